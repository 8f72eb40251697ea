"""Which stage holds which layers: for every split that is accepted, each layer once and in order."""

import copy
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.conf.compose import compose
from shardwright.parallel.stages import Split, Stages, rows
from shardwright.pretrain import checks


def letters(stages: Stages) -> list[list[str]]:
    return [[chunk.letters for chunk in chunks] for chunks in stages]


def in_order(stages: Stages) -> list[int]:
    """Layer numbers as a token meets them: the first chunk of every rank, then the second."""
    return [layer for chunks in zip(*stages, strict=True) for chunk in chunks for layer in chunk.layers]


def test_layers_are_shared_out_evenly() -> None:
    assert letters(Split(num_layers=4, pp=2).stages()) == [["Ett"], ["ttL"]]
    assert letters(Split(num_layers=4).stages()) == [["EttttL"]]


def test_chunks_of_a_rank_are_interleaved() -> None:
    stages = Split(num_layers=8, pp=2, vpp=2).stages()
    assert letters(stages) == [["Ett", "tt"], ["tt", "ttL"]]
    assert [[list(chunk.layers) for chunk in chunks] for chunks in stages] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_an_embedding_and_a_loss_may_count_as_layers() -> None:
    assert letters(Split(num_layers=6, pp=4, with_embedding=True, with_loss=True).stages()) == [
        ["Et"],
        ["tt"],
        ["tt"],
        ["tL"],
    ]
    assert letters(Split(num_layers=2, pp=2, vpp=2, with_embedding=True, with_loss=True).stages()) == [
        ["E", "t"],
        ["t", "L"],
    ]


def test_the_ends_may_hold_other_numbers() -> None:
    assert [len(chunk.layers) for (chunk,) in Split(num_layers=10, pp=4, first=3, last=1).stages()] == [3, 3, 3, 1]
    assert [len(chunk.layers) for (chunk,) in Split(num_layers=5, pp=2, first=3, last=2).stages()] == [3, 2]
    assert letters(Split(num_layers=8, pp=3, vpp=2, last=4).stages()) == [["Et", "t"], ["t", "t"], ["tt", "ttL"]]


def test_stages_may_be_written_out() -> None:
    stages = Split(num_layers=7, pp=2, vpp=2, written="Et*2|(t|)*2t*3L").stages()
    assert letters(stages) == [["Ett", "t"], ["t", "tttL"]]
    assert in_order(stages) == list(range(7))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("Ett|ttL", ["Ett", "ttL"]),
        ("Et*3|(tt|)*2m|L", ["Ettt", "tt", "tt", "m", "L"]),
        ("E,t*2,|,t,L", ["Ett", "tL"]),
        ("E||L", ["E", "", "L"]),
    ],
)
def test_multiplications_are_written_out(written: str, expected: list[str]) -> None:
    assert rows(written) == expected


TINY = compose(["cluster.gpu=none"])
sizes = st.integers(1, 6)
ends = st.none() | st.integers(1, 6)


@settings(deadline=None)
@given(each=st.integers(1, 5), pp=st.integers(2, 5), vpp=sizes, counted=st.tuples(st.booleans(), st.booleans()))
def test_every_layer_of_an_even_split_stands_once(each: int, pp: int, vpp: int, counted: tuple[bool, bool]) -> None:
    layers = each * pp * vpp - sum(counted)
    stages = Split(num_layers=layers, pp=pp, vpp=vpp, with_embedding=counted[0], with_loss=counted[1]).stages()
    assert in_order(stages) == list(range(layers))
    assert all(chunk.letters for chunk in itertools.chain(*stages))


@settings(deadline=None)
@given(layers=st.integers(1, 24), pp=st.integers(1, 5), vpp=st.integers(1, 4), first=ends, last=ends, mode=st.data())
def test_whatever_the_rules_accept_holds_every_layer_once(layers, pp, vpp, first, last, mode) -> None:
    config = copy.deepcopy(TINY)
    parallel = config.parallel
    config.model.num_layers, parallel.pp, parallel.vpp, config.cluster.ranks = layers, pp, vpp, pp
    config.data.global_batch_size = 8 * pp
    if mode.draw(st.booleans()):
        parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage = first, last
    else:
        parallel.account_for_embedding_in_pipeline_split = mode.draw(st.booleans())
        parallel.account_for_loss_in_pipeline_split = mode.draw(st.booleans())
    if checks.config_problems(config):
        return
    stages = Split.of(config).stages()
    assert len(stages) == pp and {len(chunks) for chunks in stages} == {vpp}
    assert in_order(stages) == list(range(layers))
    assert all(chunk.letters for chunk in itertools.chain(*stages))
