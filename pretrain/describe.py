"""What the `start` event tells: what runs, where, in which numbers, by which kernels. Plain JSON values."""

import os
from typing import Any

import torch.distributed as dist

from shardwright.data.batch_size import BatchSizes
from shardwright.data.source import Source
from shardwright.parallel.mcore.engine import Engine
from shardwright.pretrain import process
from shardwright.pretrain.plan import Plan
from shardwright.pretrain.rank import RankContext
from shardwright.pretrain.ranks import host_name
from shardwright.pretrain.trainer_state import TrainerState

_MODEL_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "vocab_size",
)


HOST = 5
"""Column of `rank_map`."""


def rank_map(plan: Plan, engine: Engine) -> list[list[Any]]:
    """Rows [rank, tp, cp, dp, pp, host, device] of all ranks.

    Collective: all-gather over the world; every rank calls it.
    """
    places: list[Any] = [None] * plan.layout.world_size
    dist.all_gather_object(places, (host_name(os.environ), engine.device_name))
    rows = []
    for rank, (host, kind) in enumerate(places):
        at = plan.layout.coordinates(rank)
        rows.append([rank, at.tp, at.cp, at.dp, at.pp, host, kind])
    return rows


def describe(
    context: RankContext, plan: Plan, engine: Engine, source: Source, ranks: list[list[Any]], state: TrainerState
) -> dict[str, Any]:
    """Data of the `start` event of a run that starts at `state`."""
    config, layout, batch = plan.config, plan.layout, plan.batch
    precision, ramp = config.precision, config.data.rampup_batch_size
    consumed, steps_left = state.position.consumed_samples, max(0, config.schedule.train_iters - state.step)
    samples_left = BatchSizes.of(config.data).consumed_after(steps_left, consumed) - consumed
    fp8 = {} if precision.fp8 is None else {"fp8": precision.fp8.value, "fp8_recipe": precision.fp8_recipe.value}
    narrow = plan.narrow
    return {
        "run": {"name": config.run.name, "dir": str(context.folder.path), "attempt": context.attempt.number},
        "model": {name: getattr(config.model, name) for name in _MODEL_FIELDS},
        "parameters": plan.parameters,
        "layout": {
            "world_size": layout.world_size,
            "tp": layout.tp,
            "pp": layout.pp,
            "vpp": layout.vpp,
            "cp": layout.cp,
            "ep": layout.ep,
            "etp": layout.etp,
            "dp": layout.dp,
            "sp": config.parallel.sp,
            "rank_map": ranks,
        },
        "precision": {
            "dtype": precision.dtype.value,
            "gradients": "fp32" if precision.grad_reduce_in_fp32 else precision.dtype.value,
            **fp8,
            **({} if narrow is None else narrow.in_words()),
        },
        "kernels": engine.kernels(),
        "process": process.facts(engine.device.type),
        "memory": engine.memory(),
        "param_groups": engine.parameter_groups,
        "data": {
            **source.description(),
            "micro_batch_size": batch.micro_batch_size,
            "num_microbatches": batch.num_microbatches,
            "global_batch_size": batch.global_batch_size,
            **({} if ramp is None else {"rampup_batch_size": ramp}),
        },
        "train_iters": config.schedule.train_iters,
        "first_step": state.step,
        "tokens_per_step": batch.tokens_per_step,
        "tokens_left": samples_left * config.data.seq_length,
    }
