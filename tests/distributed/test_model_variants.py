"""Every choice of the model's architecture trains, and in parallel as on one rank."""

from pathlib import Path

import pytest
import torch

from shardwright.parallel.mcore import shards

from . import engines
from .harness import RunRanks

RELATIVE = 1e-5
"""As for layouts: fp32 sums in another order."""

GPT2 = [
    "model.normalization=LayerNorm",
    "model.position_embedding_type=learned_absolute",
    "model.activation_func=gelu",
    "model.gated_linear_unit=false",
    "model.add_bias_linear=true",
    "model.num_query_groups=4",
]
QWEN3 = ["model.qk_layernorm=true", "model.share_embeddings_and_output_weights=false"]
QWEN2 = ["model.add_qkv_bias=true", "model.gated_linear_unit=true", "model.activation_func=gelu"]
VARIANTS = {"as GPT-2": GPT2, "as Qwen3": QWEN3, "as Qwen2, GEGLU": QWEN2}
LAYOUTS = {
    "tensor and sequence parallel": ["parallel.tp=2", "parallel.sp=true"],
    "pipeline parallel": ["parallel.pp=2"],
}
type Curve = list[tuple[float, float | None]]


def train_from(rank: int, world: int, store: str, overrides: list[str], start: Path) -> tuple[Curve, list[str]]:
    """Losses and norms of three steps and of the first batch again; and the parameters that did not move.

    They start from the checkpoint `start`, which one rank makes first.
    """
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    if start.exists():
        shards.load(engine, start, with_rng=False)
    else:
        engines.save(engine, start)
    before = {name: parameter.clone() for name, parameter in engine.model.module.named_parameters()}
    curve = engines.train(engine, 3) + engines.train(engine, 1, first_seed=0)
    engine.gather_parameters()
    now = dict(engine.model.module.named_parameters())
    return curve, [name for name, old in before.items() if torch.equal(old, now[name])]


@pytest.fixture(scope="module", params=VARIANTS)
def alone(request: pytest.FixtureRequest, run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory):
    start = tmp_path_factory.mktemp("start") / "checkpoint"
    variant = VARIANTS[request.param]
    return variant, start, run_ranks(train_from, 1, variant, start)[0]


def test_a_variant_learns_and_moves_every_parameter(alone) -> None:
    _, _, (curve, still) = alone
    assert curve[-1][0] < curve[0][0]
    assert still == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_variant_trains_in_parallel_like_on_one_rank(run_ranks: RunRanks, alone, layout: str) -> None:
    variant, start, (expected, _) = alone
    for curve, still in run_ranks(train_from, 2, [*variant, *LAYOUTS[layout]], start):
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=RELATIVE, atol=0)
        assert still == []
