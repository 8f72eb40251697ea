"""The data position: every sample once, for every layout and over every resume."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.data.batch_size import BatchSizes
from shardwright.data.sampler import DataPosition, micro_batches, samples_needed, step_samples

phases = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 4]),  # data-parallel size
        st.sampled_from([1, 2, 3]),  # micro-batch size
        st.integers(1, 3),  # micro-batches of a step
        st.integers(0, 4),  # steps until the run stops and resumes
        st.integers(0, 5),  # samples skipped then
    ),
    max_size=6,
)


@given(phases)
def test_no_sample_is_repeated_or_left_out_by_any_change_of_layout_and_batch_size(phases):
    position = DataPosition()
    consumed: list[int] = []
    skipped: list[int] = []
    for dp_size, micro_batch_size, num_microbatches, num_steps, num_skipped in phases:
        global_batch_size = dp_size * micro_batch_size * num_microbatches
        for _ in range(num_steps):
            samples = step_samples(position, global_batch_size)
            ranks = [micro_batches(samples, micro_batch_size, rank, dp_size) for rank in range(dp_size)]
            in_order = [i for m in range(num_microbatches) for rank in ranks for i in rank[m]]
            assert in_order == samples
            consumed += samples
            position = position.consume(global_batch_size)
        if num_skipped:
            skipped += range(position.stream_index(), position.stream_index() + num_skipped)
            position = position.skip(num_skipped)
    assert position.consumed_samples == len(consumed)
    assert sorted(consumed) == consumed
    assert sorted(consumed + skipped) == list(range(len(consumed) + len(skipped)))


@given(st.integers(0, 50), st.sets(st.integers(0, 60)))
def test_the_kth_consumed_sample_is_the_kth_one_outside_of_the_skipped_ranges(consumed, left_out):
    edges = [i for i in range(62) if (i in left_out) != (i - 1 in left_out)]
    position = DataPosition(consumed, tuple(zip(edges[::2], edges[1::2], strict=True)))
    assert position.stream_index() == [i for i in range(200) if i not in left_out][consumed]


@given(st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_a_step_has_the_same_samples_for_every_data_parallel_size(dp_size):
    samples = step_samples(DataPosition(100, ((7, 9),)), 24)
    shares = [micro_batches(samples, 2, rank, dp_size) for rank in range(dp_size)]
    assert sorted(i for share in shares for micro_batch in share for i in micro_batch) == list(range(102, 126))


def test_micro_batches_stand_in_the_order_of_megatron_core():
    samples = list(range(12))
    assert micro_batches(samples, 2, 0, 3) == [[0, 1], [6, 7]]
    assert micro_batches(samples, 2, 2, 3) == [[4, 5], [10, 11]]


def test_a_stream_is_long_enough_when_the_last_step_still_fits():
    eight = BatchSizes.constant(8)
    assert samples_needed(DataPosition(), eight, 0) == 0
    assert samples_needed(DataPosition(), eight, 3) == 24
    assert samples_needed(DataPosition(16, ((4, 6), (20, 21))), eight, 1) == 27


@pytest.mark.parametrize("skipped", [((3, 3),), ((5, 2),), ((0, 4), (2, 6)), ((6, 7), (1, 2)), ((-1, 2),)])
def test_ranges_that_are_empty_overlap_or_lie_in_another_order_are_no_position(skipped):
    with pytest.raises(ValueError, match="not a data position"):
        DataPosition(0, skipped)
