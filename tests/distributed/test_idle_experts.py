"""Experts that no token chooses, also where they are all of a rank: training goes on, and they stay as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from shardwright.parallel.mcore import shards
from shardwright.parallel.mcore.engine import Engine

from . import engines
from .agreement import RELATIVE
from .harness import RunRanks

MODEL = [
    *("model=tiny_mixtral", "model.num_layers=2", "model.vocab_size=500", "model.moe_router_topk=1"),
    *("model.moe_router_score_function=sigmoid", "model.moe_router_enable_expert_bias=true"),
    *("model.moe_router_bias_update_rate=0.0", "model.moe_router_load_balancing_type=none"),
    *("model.moe_aux_loss_coeff=0.0", "optimizer.weight_decay=0"),
]
EMULATED = ["precision.fp8=hybrid", "precision.fp8_recipe=delayed", "precision.backend=emulated"]
NUM_STEPS = 3
NUM_EXPERTS = 4
HAS_TOKENS = 0
"""The one expert that has; with EP2 the second rank has none of them."""


def idle_experts(engine: Engine) -> dict[str, Any]:
    """Parameters of this rank's experts without tokens."""
    first = NUM_EXPERTS // engine.layout.ep * engine.groups.ep.rank()
    return {
        name: parameter
        for name, parameter in engine.model.module.named_parameters()
        if ".experts.local_experts." in name and int(name.split("local_experts.")[1][0]) + first != HAS_TOKENS
    }


def losses_with_one_expert(
    rank: int, world: int, store: str, overrides: list[str], start: Path
) -> tuple[list[float], list[str], list[str], float]:
    """Losses; idle parameters with another gradient than zero, and those that moved; and the fullest expert's load."""
    engine = engines.engine_of(engines.family_config([*MODEL, *overrides], world), rank, store)
    if start.exists():
        shards.load(engine, start, with_rng=False)
    else:
        engines.save(engine, start)
    for module in engine.model.modules():
        if isinstance(module, TopKRouter):
            module.expert_bias[HAS_TOKENS] = 1e3
    idle = idle_experts(engine)
    before = {name: parameter.detach().clone() for name, parameter in idle.items()}
    steps = (engines.random_step(number) for number in range(NUM_STEPS))
    results = [engine.train_step(engines.share(engine, step), lr=1e-3, weight_decay=0.0) for step in steps]
    engine.gather_parameters()
    assert idle and all(parameter.main_grad is not None for parameter in idle.values())
    pulled = [name for name, parameter in idle.items() if not (parameter.main_grad == 0).all()]
    moved = [name for name, parameter in idle.items() if not torch.equal(parameter, before[name])]
    return [result.loss for result in results], pulled, moved, results[-1].expert_load["expert_load_max"]


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    start = tmp_path_factory.mktemp("start") / "checkpoint"
    return start, run_ranks(losses_with_one_expert, 1, [], start)[0][0]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["parallel.ep=2"], id="EP2"),
        pytest.param(["parallel.ep=2", "parallel.pp=2"], id="EP2 PP2", marks=pytest.mark.slow),
        pytest.param(
            ["parallel.ep=2", "model.moe_token_dispatcher_type=allgather"], id="gather", marks=pytest.mark.slow
        ),
        pytest.param(
            ["parallel.tp=2", "parallel.sp=true", "parallel.etp=1", "parallel.ep=2"], id="TP2", marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_whose_experts_get_no_token_trains_like_the_others(
    run_ranks: RunRanks, alone: tuple[Path, list[float]], overrides: list[str]
) -> None:
    start, expected = alone
    world = 4 if "parallel.pp=2" in overrides else 2
    for losses, pulled, moved, load in run_ranks(losses_with_one_expert, world, overrides, start, timeout_seconds=60):
        assert losses == pytest.approx(expected, rel=RELATIVE)
        assert pulled == [] and moved == []
        assert load == pytest.approx(NUM_EXPERTS), "one expert has everything"


@pytest.mark.slow
def test_experts_without_tokens_in_emulated_fp8(run_ranks: RunRanks, alone: tuple[Path, list[float]]) -> None:
    start, expected = alone
    for losses, pulled, moved, _ in run_ranks(
        losses_with_one_expert, 2, ["parallel.ep=2", *EMULATED], start, timeout_seconds=60
    ):
        assert losses == pytest.approx(expected, rel=0.02), "FP8 rounds"
        assert pulled == [] and moved == []
