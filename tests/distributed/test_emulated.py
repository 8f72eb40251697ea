"""FP8 and FP4 by emulation, through the real tensor-, sequence-, pipeline- and data-parallel schedules."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.parallel.fp8.delayed import DelayedScaling
from shardwright.parallel.mcore import shards
from shardwright.parallel.mcore.emulated import _Emulated
from shardwright.parallel.mcore.engine import Engine

from . import engines
from .harness import RunRanks
from .tail import long_tail

type Curve = list[tuple[float, float | None]]
"""Loss and gradient norm of each step."""

EMULATED = "precision.backend=emulated"
DELAYED = ["precision=fp8_delayed", "precision.dtype=fp32", "precision.fp8_amax_history_len=4", EMULATED]
LAYOUTS = {
    "one rank": (1, []),
    "TP2": (2, ["parallel.tp=2"]),
    "TP2 with SP": (2, ["parallel.tp=2", "parallel.sp=true"]),
    "DP2": (2, []),
    "PP2": (2, ["parallel.pp=2"]),
}


def curve(rank: int, world: int, store: str, overrides: list[str]) -> Curve:
    return engines.train(engines.engine_of(engines.config_of(overrides, world), rank, store), num_steps=4)


@pytest.mark.parametrize(
    "recipe", long_tail(["fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4"], quick=["fp8_delayed"])
)
def test_every_recipe_trains_near_fp32_and_not_in_it(run_ranks: RunRanks, recipe: str) -> None:
    plain = run_ranks(curve, 1, [])[0]
    narrow = run_ranks(curve, 1, [f"precision={recipe}", "precision.dtype=fp32", EMULATED])[0]
    for (loss, norm), (loss_plain, norm_plain) in zip(narrow, plain, strict=True):
        assert loss == pytest.approx(loss_plain, rel=0.02)
        assert loss != loss_plain and norm is not None
        assert norm == pytest.approx(norm_plain, rel=0.3)


def state(rank: int, world: int, store: str, overrides: list[str], num_steps: int) -> dict[str, Any]:
    """Every scale and history after some steps, and how many micro-batches each history holds."""
    engine = engines.engine_of(engines.config_of([*DELAYED, *overrides], world), rank, store)
    engines.train(engine, num_steps)
    return state_of(engine)


def delayed(engine: Engine) -> list[tuple[str, DelayedScaling]]:
    layers = [(name, layer) for name, layer in engine.model.module.named_modules() if isinstance(layer, _Emulated)]
    return [(name, layer.recipe) for name, layer in layers if isinstance(layer.recipe, DelayedScaling)]


def state_of(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, recipe in delayed(engine):
        for operand, history in recipe.histories.items():
            found[f"{name} {operand}"] = (history.scale.item(), history.amaxes.tolist())
    return found


@pytest.mark.parametrize("layout", long_tail(["TP2", "TP2 with SP", "DP2", "PP2"], quick=["TP2 with SP"]))
def test_scales_and_histories_are_the_same_to_the_bit_on_all_ranks_of_the_group(
    run_ranks: RunRanks, layout: str
) -> None:
    world, overrides = LAYOUTS[layout]
    first, second = run_ranks(state, world, overrides, 2)
    if layout == "PP2":  # each stage is a group of its own
        assert first.keys() == second.keys() and first != second
    else:
        assert first == second
    assert all(scale != 1.0 for scale, _ in first.values())


@pytest.mark.parametrize("layout", long_tail(["one rank", "PP2"], quick=["one rank"]))
def test_each_amax_enters_a_history_once_per_micro_batch(run_ranks: RunRanks, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    for found in run_ranks(state, world, ["precision.fp8_amax_history_len=16", *overrides], 2):
        for name, (_, amaxes) in found.items():  # two steps of four micro-batches
            assert [amax > 0 for amax in amaxes] == [False] * 8 + [True] * 8, name


@pytest.mark.parametrize(
    "how",
    [
        "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1",
        pytest.param("model.recompute_granularity=selective model.recompute_modules=[mlp]", marks=pytest.mark.slow),
    ],
)
def test_recomputation_changes_neither_losses_nor_histories(run_ranks: RunRanks, how: str) -> None:
    recomputed = run_ranks(state, 1, how.split(), 3)[0]
    assert recomputed == run_ranks(state, 1, [], 3)[0]
    assert run_ranks(curve, 1, [*DELAYED, *how.split()])[0] == run_ranks(curve, 1, DELAYED)[0]


def after_evaluation(rank: int, world: int, store: str) -> tuple[Any, Any]:
    engine = engines.engine_of(engines.config_of(DELAYED, world), rank, store)
    engines.train(engine, 1)
    recipes = [recipe for _, recipe in delayed(engine)]

    def amaxes() -> list[list[float]]:
        return [h.amaxes.tolist() for recipe in recipes for h in recipe.histories.values()]

    before = amaxes()
    engine.evaluate(iter([engines.share(engine, engines.random_step(9))]))
    return before, amaxes()


def test_evaluation_leaves_histories_alone(run_ranks: RunRanks) -> None:
    before, after = run_ranks(after_evaluation, 1)[0]
    assert before == after


def saved(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> tuple[dict[str, Any], Curve]:
    """The state at a checkpoint, and the steps after it."""
    engine = engines.engine_of(engines.config_of([*DELAYED, *overrides], world), rank, store)
    engines.train(engine, 2)
    found = state_of(engine)
    engines.save(engine, folder)
    return found, engines.train(engine, 2, first_seed=2)


def loaded(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> tuple[dict[str, Any], Curve]:
    engine = engines.engine_of(engines.config_of([*DELAYED, *overrides], world), rank, store)
    shards.load(engine, folder, with_rng=False)
    return state_of(engine), engines.train(engine, 2, first_seed=2)


@pytest.mark.parametrize("layout", long_tail(["one rank", "TP2 with SP", "PP2"], quick=["TP2 with SP"]))
def test_a_checkpoint_holds_scales_and_histories(run_ranks: RunRanks, tmp_path: Path, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    before = run_ranks(saved, world, overrides, tmp_path / "checkpoint")
    assert run_ranks(loaded, world, overrides, tmp_path / "checkpoint") == before


def test_scales_and_histories_load_in_another_layout(run_ranks: RunRanks, tmp_path: Path) -> None:
    world, overrides = LAYOUTS["TP2 with SP"]
    (found, steps), _ = run_ranks(saved, world, overrides, tmp_path / "checkpoint")
    found_there, steps_there = run_ranks(loaded, 1, [], tmp_path / "checkpoint")[0]
    assert found_there == found
    for (loss, _), (loss_there, _) in zip(steps, steps_there, strict=True):
        assert loss_there == pytest.approx(loss, rel=2e-3), "a row-parallel layer's gradient has a scale a rank"


@pytest.mark.slow
def test_a_longer_or_shorter_history_keeps_the_newest_amaxes(run_ranks: RunRanks, tmp_path: Path) -> None:
    found, _ = run_ranks(saved, 1, [], tmp_path / "checkpoint")[0]
    for length in (2, 6):
        other = run_ranks(loaded, 1, [f"precision.fp8_amax_history_len={length}"], tmp_path / "checkpoint")[0][0]
        for name, (scale, amaxes) in found.items():
            assert other[name] == (scale, ([0.0] * 8 + amaxes)[-length:])


@pytest.mark.slow
def test_training_goes_on_from_bf16_to_fp8_and_back(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Without histories a run in FP8 begins with scales of 1 and fills them within its first step."""
    plain = ["precision=bf16"]
    narrow = ["precision=fp8_delayed", EMULATED]
    run_ranks(saved_plain, 1, plain, tmp_path / "bf16")
    losses = run_ranks(goes_on, 1, narrow, tmp_path / "bf16", tmp_path / "fp8")[0]
    back = run_ranks(goes_on, 1, plain, tmp_path / "fp8", tmp_path / "bf16 again")[0]
    for loss, norm in [*losses, *back]:
        assert 5.5 < loss < 7.0 and norm is not None


def saved_plain(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> None:
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    engines.train(engine, 2)
    engines.save(engine, folder)


def goes_on(rank: int, world: int, store: str, overrides: list[str], folder: Path, then: Path) -> Curve:
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    shards.load(engine, folder, with_rng=False)
    steps = engines.train(engine, 2, first_seed=2)
    engines.save(engine, then)
    return steps


def reduced(rank: int, world: int, store: str, values: list[float]) -> tuple[float, list[float], list[str]]:
    """One tensor whose amax is `values[rank]`; its former scale is 224."""
    from shardwright.parallel.fp8.delayed import Regions
    from shardwright.parallel.fp8.formats import E4M3, E5M2

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    layer = DelayedScaling(4, E4M3, E5M2, torch.device("cpu"))
    history = layer.histories["x"]
    history.scale = torch.tensor(224.0)
    history.note(torch.tensor([values[rank], -1.0]))
    regions = Regions({"layer": layer}, dist.group.WORLD, margin=0, largest=True)
    regions.end_forward()
    return history.scale.item(), history.amaxes.tolist(), regions.non_finite


def test_a_scale_follows_the_largest_amax_of_the_group(run_ranks: RunRanks) -> None:
    assert run_ranks(reduced, 2, [2.0, 8.0]) == [(56.0, [0.0, 0.0, 0.0, 8.0], [])] * 2


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("values", [[NAN, 3.0], [3.0, NAN], [INF, 3.0], [3.0, INF]], ids=str)
def test_a_non_finite_amax_of_any_rank_is_named_on_all_and_changes_nothing(
    run_ranks: RunRanks, values: list[float]
) -> None:
    assert run_ranks(reduced, 2, values) == [(224.0, [0.0, 0.0, 0.0, 0.0], ["layer x"])] * 2
