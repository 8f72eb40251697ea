"""Saved in one layout, loaded in another, weights and optimizer state: what comes next is the same.

Every run is continued in the layout that saved it too, and that is what the others are held to.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import permutations, product
from pathlib import Path

import pytest

from shardwright.parallel.mcore import shards

from . import engines
from .agreement import Run, assert_agree
from .engines import TINY
from .harness import RunRanks
from .tail import long_tail

BEFORE, AFTER = 2, 2
"""Steps before and after the checkpoint; the last one shows what the update after the load did."""
STABLE = "optimizer.adam_eps=1e-6"
"""With Adam's usual 1e-8 an element whose gradient is zero but for rounding moves by a whole step either way."""
SEQUENCE = ["parallel.tp=2", "parallel.sp=true"]
ONE, ONE_WITH_EXPERTS = "one rank", "one rank, experts"
DENSE = {
    ONE: (1, []),
    "TP2 SP": (2, SEQUENCE),
    "DP2": (2, []),
    "PP2": (2, ["parallel.pp=2"]),
    "PP2 VPP2": (2, ["parallel.pp=2", "parallel.vpp=2"]),
    "CP2": (2, ["parallel.cp=2"]),
}
WIDE_DENSE = {
    "TP2 SP PP2": (4, [*SEQUENCE, "parallel.pp=2"]),
    "DP2 CP2": (4, ["parallel.cp=2"]),
}
EXPERTS = {
    ONE_WITH_EXPERTS: (1, []),
    "EP2": (2, ["parallel.ep=2"]),
    "TP2 SP ETP2": (2, SEQUENCE),
    "TP2 SP ETP1 EP2": (2, [*SEQUENCE, "parallel.ep=2", "parallel.etp=1"]),
    "PP2 VPP2, experts": (2, ["parallel.pp=2", "parallel.vpp=2"]),
}
WIDE_EXPERTS = {
    "EP4": (4, ["parallel.ep=4"]),
    "PP2 EP2": (4, ["parallel.pp=2", "parallel.ep=2"]),
}
LAYOUTS = DENSE | WIDE_DENSE | EXPERTS | WIDE_EXPERTS


def model_of(layout: str) -> list[str]:
    if layout in DENSE | WIDE_DENSE:
        return [*TINY, "model.num_layers=4", STABLE]
    return ["model=tiny_mixtral", "model.vocab_size=500", STABLE]


def pairs(layouts: Iterable[str], wide: Iterable[str]) -> Iterator[tuple[str, str]]:
    """All pairs of layouts, both ways; the wide ones, of four ranks, among themselves and with the first two others."""
    first_two = [*layouts][:2]
    yield from permutations(layouts, 2)
    yield from permutations(wide, 2)
    yield from product(wide, first_two)
    yield from product(first_two, wide)


PAIRS = {f"{a} -> {b}": (a, b) for a, b in (*pairs(DENSE, WIDE_DENSE), *pairs(EXPERTS, WIDE_EXPERTS))}
QUICK = ("TP2 SP -> PP2 VPP2", "EP2 -> TP2 SP ETP1 EP2")


def train(rank: int, world: int, store: str, overrides: list[str], start: Path, results: Path) -> Run:
    """Save after some steps, or load what was saved; then train on."""
    engine = engines.engine_of(engines.family_config(overrides, world), rank, store)
    if start.exists():
        shards.load(engine, start, with_rng=False)
    else:
        engines.train(engine, BEFORE)
        engines.save(engine, start)
    curve = engines.train(engine, AFTER, first_seed=BEFORE)
    engines.save(engine, results)
    tensors = engines.full_tensors(results) if rank == 0 else {}
    return curve, tensors, tensors


@pytest.fixture(scope="module")
def saved(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Run]]:
    """A function from a layout to what it saved, and how it went on itself."""

    @cache
    def train_in(name: str) -> tuple[Path, Run]:
        folder = tmp_path_factory.mktemp("saved")
        world, overrides = LAYOUTS[name]
        start = folder / "start"
        return start, run_ranks(train, world, [*model_of(name), *overrides], start, folder / "last")[0]

    return train_in


@pytest.mark.parametrize("pair", long_tail(PAIRS, quick=QUICK))
def test_a_checkpoint_goes_on_in_another_layout(
    run_ranks: RunRanks, saved: Callable[[str], tuple[Path, Run]], tmp_path: Path, pair: str
) -> None:
    source, target = PAIRS[pair]
    start, expected = saved(source)
    world, overrides = LAYOUTS[target]
    assert_agree(run_ranks(train, world, [*model_of(target), *overrides], start, tmp_path / "last"), expected)
