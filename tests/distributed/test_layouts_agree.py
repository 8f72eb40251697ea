"""One checkpoint, ten steps, every layout: the same losses, gradients and weights.

Which layouts these are follows from the axes that `tests/layouts.py` declares.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from .. import layouts
from ..layouts import KINDS, NUM_STEPS
from .agreement import Run, assert_agree, start_from_scratch, train_from
from .harness import RunRanks
from .tail import long_tail

PROVEN = {case.name: case for kind in KINDS for case in layouts.proven(kind)}
WAYS = {f"{kind}: {name}": (kind, *way) for kind, ways in layouts.WAYS.items() for name, way in ways.items()}
UNEQUAL = {case.name: case for kind in KINDS for case in layouts.unequal(kind) if len(case.choices) == 1}
"""One alone for each choice that makes a layout unequal."""
QUICK = ("dense: DP2", "dense: TP2+SP", "dense: PP2+VPP2", "dense: CP2", "aux_loss: TP2+SP EP2 ETP1")
"""One of each kind."""
LIMIT_SECONDS = 300
"""Ten steps of four ranks on two busy cores."""

type Alone = Callable[[str], tuple[Path, Run]]


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A function from a kind of model to its first checkpoint and what one rank makes of that."""

    @cache
    def train(kind: str) -> tuple[Path, Run]:
        folder, overrides = tmp_path_factory.mktemp("alone"), KINDS[kind].overrides
        run_ranks(start_from_scratch, 1, overrides, folder / "start")
        run = run_ranks(train_from, 1, overrides, NUM_STEPS, folder / "start", folder, timeout_seconds=LIMIT_SECONDS)
        return folder / "start", run[0]

    return train


@pytest.mark.parametrize("name", long_tail(PROVEN, quick=QUICK))
def test_a_layout_trains_like_one_rank(run_ranks: RunRanks, alone: Alone, tmp_path: Path, name: str) -> None:
    case = PROVEN[name]
    start, expected = alone(case.kind)
    assert_agree(
        run_ranks(train_from, case.world, case.overrides, NUM_STEPS, start, tmp_path, timeout_seconds=LIMIT_SECONDS),
        expected,
    )


@pytest.mark.parametrize("name", long_tail(WAYS, quick=[]))
def test_every_way_of_a_layout_trains_like_one_rank(
    run_ranks: RunRanks, alone: Alone, tmp_path: Path, name: str
) -> None:
    kind, world, overrides = WAYS[name]
    start, expected = alone(kind)
    found = run_ranks(
        train_from,
        world,
        [*KINDS[kind].overrides, *overrides],
        NUM_STEPS,
        start,
        tmp_path,
        timeout_seconds=LIMIT_SECONDS,
    )
    assert_agree(found, expected)


@pytest.mark.parametrize("name", long_tail(UNEQUAL, quick=[]))
def test_what_is_unequal_by_its_nature_is_unequal(run_ranks: RunRanks, alone: Alone, tmp_path: Path, name: str) -> None:
    case = UNEQUAL[name]
    start, expected = alone(case.kind)
    found = run_ranks(train_from, case.world, case.overrides, NUM_STEPS, start, tmp_path, timeout_seconds=LIMIT_SECONDS)
    with pytest.raises(AssertionError):
        assert_agree(found, expected)


def test_training_moves_every_tensor(alone: Alone) -> None:
    _, (_, first, last) = alone("dense")
    still = [name for name, tensor in first.items() if torch.equal(tensor, last[name])]
    assert not still
    gradients = {name: tensor for name, tensor in first.items() if ".exp_avg." in name}
    assert gradients and all(tensor.abs().max() > 0 for tensor in gradients.values())
