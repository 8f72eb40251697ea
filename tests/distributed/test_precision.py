"""Number formats, and what happens when numbers leave them."""

import math
from pathlib import Path

import pytest
import torch

from shardwright.parallel.mcore import shards
from shardwright.parallel.mcore.engine import Engine

from . import engines
from .harness import RunRanks

type Curve = list[tuple[float, float | None]]
"""Loss and gradient norm of each step."""

FP16 = ["precision=fp16", "precision.initial_loss_scale=1024", "precision.hysteresis=1"]


def plant(engine: Engine, value: float) -> None:
    """Every token loss of this rank is multiplied by `value` from now on."""
    compute = engine.model.module.compute_language_model_loss
    engine.model.module.compute_language_model_loss = lambda *args: compute(*args) * value


def overflow(rank: int, world: int, store: str) -> list[tuple[bool, float, bool, bool]]:
    """Three fp16 steps, the second with gradients of rank 1 beyond 65504: updated, scale, weights moved, finite."""
    engine = engines.engine_of(engines.config_of(FP16, world), rank, store)
    seen = []
    for number in range(3):
        if rank == 1:
            engine.model.module.__dict__.pop("compute_language_model_loss", None)
            if number == 1:
                plant(engine, 1e7)
        before = [parameter.clone() for parameter in engine.model.module.parameters()]
        result = engine.train_step(engines.share(engine, engines.random_step(number)), lr=1e-3, weight_decay=0.1)
        engine.gather_parameters()
        now = engine.model.module.parameters()
        moved = any(not torch.equal(old, new) for old, new in zip(before, now, strict=True))
        assert result.loss_scale is not None
        seen.append((result.updated, result.loss_scale, moved, result.non_finite_ranks is None))
    return seen


def test_an_fp16_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(run_ranks: RunRanks) -> None:
    for seen in run_ranks(overflow, 2):
        assert seen == [(True, 1024.0, True, True), (False, 1024.0, False, True), (True, 512.0, True, True)]


def nan_on_rank_1(rank: int, world: int, store: str) -> tuple[bool, bool, tuple[int, ...] | None]:
    engine = engines.engine_of(engines.config_of([], world), rank, store)
    if rank == 1:
        plant(engine, math.nan)
    before = [parameter.clone() for parameter in engine.model.module.parameters()]
    result = engine.train_step(engines.share(engine, engines.random_step(0)), lr=1e-3, weight_decay=0.1)
    engine.gather_parameters()
    still = all(torch.equal(a, b) for a, b in zip(before, engine.model.module.parameters(), strict=True))
    return result.updated, still, result.non_finite_ranks


def test_a_nan_on_one_rank_is_known_to_all_and_moves_no_weight(run_ranks: RunRanks) -> None:
    assert run_ranks(nan_on_rank_1, 2) == [(False, True, (1,)), (False, True, (1,))]


def steps_of(rank: int, world: int, store: str, overrides: list[str]) -> Curve:
    return engines.train(engines.engine_of(engines.config_of(overrides, world), rank, store), 5)


RECOMPUTATION = {
    "core attention": ["model.recompute_granularity=selective"],
    "core attention and MLP": [
        "model.recompute_granularity=selective",
        "model.recompute_modules=[core_attn,mlp]",
    ],
    "every layer": [
        "model.recompute_granularity=full",
        "model.recompute_method=uniform",
        "model.recompute_num_layers=1",
    ],
    "one layer of each stage": [
        "model.recompute_granularity=full",
        "model.recompute_method=block",
        "model.recompute_num_layers=1",
    ],
}
DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]


@pytest.mark.parametrize("what", RECOMPUTATION)
def test_recomputation_changes_no_bit_also_with_dropout(run_ranks: RunRanks, kept, what: str) -> None:
    assert run_ranks(steps_of, 1, [*DROPOUT, *RECOMPUTATION[what]])[0] == kept


@pytest.fixture(scope="module")
def kept(run_ranks: RunRanks) -> Curve:
    curve: Curve = run_ranks(steps_of, 1, DROPOUT)[0]
    return curve


def go_on(rank: int, world: int, store: str, folder: Path) -> tuple[Curve, float]:
    """Four fp16 steps with a save after the second, or the last two after loading it; and the scale at the end."""
    config = engines.config_of(["precision=fp16", "precision.loss_scale_window=1"], world)
    engine = engines.engine_of(config, rank, store)
    if (folder / "saved").exists():
        shards.load(engine, folder / "saved", with_rng=True)
    else:
        engines.train(engine, 2)
        engines.save(engine, folder / "saved")
    return engines.train(engine, 2, first_seed=2), float(engine.optimizer.get_loss_scale())


def test_an_fp16_run_goes_on_bit_for_bit_with_its_loss_scale(run_ranks: RunRanks, tmp_path: Path) -> None:
    whole, resumed = run_ranks(go_on, 2, tmp_path), run_ranks(go_on, 2, tmp_path)
    assert whole == resumed
    assert whole[0][1] != 65536.0, "the scale never moved, so this shows nothing"
