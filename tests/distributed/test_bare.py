"""The yardstick of benchmarks does the engine's work: one seed and the same tokens give both the same losses."""

import pytest
import torch
import torch.distributed as dist

from shardwright.parallel.mcore import groups
from shardwright.parallel.mcore.bare import bare_step
from shardwright.pretrain import plan

from . import engines
from .harness import RunRanks
from .tail import long_tail

NUM_STEPS = 4
UNMASKED = [64, 3, 20, 17]
"""Unmasked tokens of the four samples: a mean over micro-batches would be another loss and another gradient."""
RELATIVE = 1e-6
"""Only the order of fp32 sums may differ."""

LAYOUTS = {
    "one rank": (1, []),
    "data parallel": (2, []),
    "tensor and sequence parallel": (2, ["parallel.tp=2", "parallel.sp=true"]),
    "pipeline parallel": (2, ["parallel.pp=2"]),
    "interleaved stages": (2, ["parallel.pp=2", "parallel.vpp=2", "parallel.pipeline_layout=E|t|t|L"]),
    "context parallel": (2, ["parallel.cp=2"]),
}
EXPERTS = ["model=tiny_deepseek", "model.vocab_size=500", "model.num_layers=2", "model.moe_layer_freq='[0,1]'"]


def losses_of_both(rank: int, world: int, store: str, overrides: list[str]) -> tuple[list[float], list[float]]:
    """Losses of the engine and of the bare loop, both in one rank, from the same seed."""
    config = engines.family_config(overrides, world)
    steps = [engines.random_step(number, unmasked=UNMASKED) for number in range(NUM_STEPS)]
    engine = engines.engine_of(config, rank, store)
    lr, weight_decay = config.optimizer.lr, config.optimizer.weight_decay
    ours = [engine.train_step(engines.share(engine, step), lr, weight_decay).loss for step in steps]
    groups.seed_everything(config.run.seed, engine.layout, rank)
    step = bare_step(config, engine.layout, engine.groups, engine.device, rank, plan.padded_vocab_size(config.model))
    sums = torch.stack([step(engines.share(engine, batch)) for batch in steps])
    dist.all_reduce(sums)  # tensor-parallel ranks repeat numerator and denominator alike
    return ours, (sums[:, 0] / sums[:, 1]).tolist()


@pytest.mark.parametrize(
    "name", long_tail(LAYOUTS, quick=["one rank", "tensor and sequence parallel", "interleaved stages"])
)
def test_engine_and_bare_loop_have_the_same_losses(run_ranks: RunRanks, name: str) -> None:
    world, overrides = LAYOUTS[name]
    assert_same(run_ranks(losses_of_both, world, [*engines.TINY, *overrides]))


def test_both_learn_from_all_losses_of_a_model_with_experts_and_multi_token_prediction(run_ranks: RunRanks) -> None:
    assert_same(run_ranks(losses_of_both, 2, [*EXPERTS, "parallel.ep=2"]))


def assert_same(results: list[tuple[list[float], list[float]]]) -> None:
    for ours, bare in results:
        assert ours == pytest.approx(bare, rel=RELATIVE)
        assert len(set(ours)) == NUM_STEPS
