"""Learning rate, weight decay and batch size are pure functions of the update and of the samples consumed."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.conf.compose import compose
from shardwright.conf.schema import Config
from shardwright.data.batch_size import BatchSizes
from shardwright.pretrain.plan import make_plan
from shardwright.pretrain.schedule import Update, next_update, warmup_updates

BASE = ["optimizer.lr=1e-3", "optimizer.min_lr=1e-4", "schedule.train_iters=20", "schedule.lr_warmup_iters=5"]
WSD = ["schedule=wsd", "schedule.lr_wsd_decay_iters=4"]
RAMP = ["data.global_batch_size=8", "data.micro_batch_size=1", "data.rampup_batch_size=[2,2,24]"]
IN_SAMPLES = ["schedule.lr_warmup_iters=null", "schedule.lr_warmup_samples=40"]


def config_of(*overrides: str) -> Config:
    groups = [override for override in overrides if override.startswith("schedule=")]
    return compose([*groups, *BASE, *(override for override in overrides if override not in groups)])


def updates(config: Config, consumed_samples: int = 0, first: int = 0) -> list[Update]:
    """What a loop meets that begins at step `first`."""
    met = []
    for step in range(first, config.schedule.train_iters):
        met.append(next_update(step, consumed_samples, config))
        consumed_samples += met[-1].batch_size
    return met


def rates(*overrides: str) -> list[float]:
    return [update.learning_rate for update in updates(config_of(*overrides))]


def decays(*overrides: str) -> list[float]:
    return [update.weight_decay for update in updates(config_of("optimizer.weight_decay=0.1", *overrides))]


# ---- learning rate ---------------------------------------------------------------------------------------------------


def test_the_first_update_already_moves() -> None:
    assert rates()[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])


def test_without_warm_up_the_first_update_decays_from_the_peak() -> None:
    assert rates("schedule.lr_warmup_iters=0", "schedule.lr_decay_style=constant") == [1e-3] * 20
    assert 9.9e-4 < rates("schedule.lr_warmup_iters=0")[0] < 1e-3


def test_cosine_ends_at_min_lr_and_is_halfway_in_the_middle() -> None:
    curve = rates("schedule.lr_warmup_iters=0")
    assert curve[-1] == pytest.approx(1e-4)
    assert curve[9] == pytest.approx((1e-3 + 1e-4) / 2)
    assert curve == sorted(curve, reverse=True)


def test_update_13_of_the_published_curve() -> None:
    # warm-up 5, 20 updates, 1e-3 to 1e-4: the value that a resumed run must use again
    assert rates()[12] == pytest.approx(5.02962e-4, rel=1e-5)


@pytest.mark.parametrize("style", ["cosine", "linear", "inverse_square_root"])
def test_after_the_decay_the_rate_stays_at_min_lr(style: str) -> None:
    assert rates(f"schedule={style}", "schedule.lr_decay_iters=10")[10:] == [1e-4] * 10


def test_constant_stays_at_the_peak() -> None:
    assert rates("schedule=constant")[4:] == [1e-3] * 16


def test_linear_falls_by_the_same_amount_each_update() -> None:
    assert rates("schedule=linear")[4:] == pytest.approx([1e-3 - n * 9e-4 / 15 for n in range(16)])


def test_inverse_square_root_halves_when_the_update_quadruples_and_keeps_above_min_lr() -> None:
    curve = rates("schedule=inverse_square_root", "optimizer.min_lr=5.5e-4")
    assert (curve[4], curve[9]) == pytest.approx((1e-3, 1e-3 / 2**0.5))
    assert curve[19] == 5.5e-4, "1e-3 / 2 without the floor"


@pytest.mark.parametrize(
    ("style", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_stays_at_the_peak_and_falls_over_its_last_updates(style: str, middle: float) -> None:
    curve = rates(*WSD, f"schedule.lr_wsd_decay_style={style}")
    assert curve[4:16] == pytest.approx([1e-3] * 12)
    assert curve[17] == pytest.approx(1e-4 + middle * 9e-4)
    assert curve[19] == pytest.approx(1e-4)
    assert curve[15:] == sorted(curve[15:], reverse=True)


def test_the_warm_up_may_be_a_fraction_of_the_decay() -> None:
    fraction = ["schedule.lr_warmup_iters=null", "schedule.lr_warmup_fraction=0.25"]
    assert rates(*fraction) == rates()
    assert warmup_updates(config_of(*fraction, "schedule.lr_decay_iters=40")) == 10


def test_a_warm_up_in_samples_follows_the_samples_of_every_update() -> None:
    assert rates(*IN_SAMPLES) == rates(), "5 updates of 8 samples"
    # 2 2 2 2 4 4 6 6 8 8 samples: update 9 is the first one after which 36 are consumed
    curve = rates(*IN_SAMPLES, "schedule.lr_warmup_samples=36", *RAMP)
    assert curve[:9] == pytest.approx([1e-3 * samples / 36 for samples in (2, 4, 6, 8, 12, 16, 22, 28, 36)])
    assert curve[9] < curve[8]


def test_a_warm_up_in_samples_goes_on_from_the_samples_when_the_batch_size_changes() -> None:
    config = config_of(*IN_SAMPLES, "data.global_batch_size=16")
    assert next_update(2, 16, config).learning_rate == pytest.approx(1e-3 * 32 / 40)


# ---- weight decay ----------------------------------------------------------------------------------------------------


def test_weight_decay_is_constant_without_an_end() -> None:
    assert decays() == [0.1] * 20


def test_weight_decay_reaches_its_end_with_the_last_update() -> None:
    linear, cosine = (
        decays("schedule.end_weight_decay=0.3", f"schedule.weight_decay_incr_style={style}")
        for style in ("linear", "cosine")
    )
    assert linear == pytest.approx([0.1 + 0.01 * update for update in range(1, 21)])
    assert (cosine[9], cosine[19]) == pytest.approx((0.2, 0.3))
    assert cosine[4] < linear[4]


# ---- batch size ------------------------------------------------------------------------------------------------------


def test_a_ramp_grows_with_the_samples_consumed() -> None:
    consumed, sizes = 0, []
    for update in updates(config_of(*RAMP))[:10]:
        sizes.append((consumed, update.batch_size))
        consumed += update.batch_size
    assert sizes == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 4), (12, 4), (16, 6), (22, 6), (28, 8), (36, 8)]


def test_a_resume_in_the_middle_of_a_ramp_goes_on_with_it() -> None:
    config = config_of(*RAMP)
    whole = updates(config)
    assert [update.batch_size for update in updates(config, consumed_samples=22, first=7)][:3] == [6, 8, 8]
    assert updates(config, consumed_samples=22, first=7) == whole[7:]


DATA = config_of().data
ramps = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 100), st.integers(1, 6))


def batch_sizes(ramp: tuple[int, int, int, int]) -> BatchSizes:
    """The sizes of a ramp [start, increment, samples] with this many increments."""
    end = ramp[0] + ramp[1] * ramp[3]
    return BatchSizes.of(dataclasses.replace(DATA, global_batch_size=end, rampup_batch_size=list(ramp[:3])))


@given(ramps)
def test_every_stage_of_a_ramp_is_an_equal_share_of_its_samples(ramp) -> None:
    start, increment, samples, num_increments = ramp
    sizes = batch_sizes(ramp)
    for consumed_samples in range(2 * samples):
        grown = min(num_increments, consumed_samples * num_increments // samples)
        assert sizes.at(consumed_samples) == start + increment * grown


@given(ramps, st.integers(0, 60), st.integers(0, 60))
def test_steps_are_counted_as_if_they_were_taken_one_by_one(ramp, num_steps, consumed_samples) -> None:
    sizes = batch_sizes(ramp)
    one_by_one = consumed_samples + sum(sizes.steps(consumed_samples, num_steps))
    assert sizes.consumed_after(num_steps, consumed_samples) == one_by_one
    assert sizes.steps_to(sizes.consumed_after(num_steps)) == num_steps
    assert sizes.steps_to(sizes.consumed_after(num_steps) + 1) == num_steps + 1


def test_the_plan_counts_the_samples_of_the_ramp() -> None:
    plan = make_plan(config_of(*RAMP, "schedule.train_iters=10"))
    assert (plan.train_samples, plan.train_tokens) == (44, 44 * 256)
    assert make_plan(config_of("schedule.train_iters=10")).train_samples == 80
