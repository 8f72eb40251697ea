"""The bytes of a checkpoint: sharded weights, optimizer state and RNG through megatron-core's dist_checkpointing.

Policy (folders, commit, retention, what to resume from) lives in `pretrain/checkpoint.py`; here is only what needs
megatron-core. The optimizer's format is `fully_reshardable`, which loads in any other layout.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_common_state_dict, load_sharded_metadata
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from shardwright.parallel.mcore import optimizers, safe_load
from shardwright.parallel.mcore.engine import Engine

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save(engine: Engine, folder: Path) -> None:
    """Write this rank's shards into `folder`, which exists and is empty.

    Collective: every rank calls it; returns when all ranks have written and synced their files.
    """
    engine.gather_parameters()
    # one manager process for the writers' results, forked: spawning one costs seconds per run
    filesystem_async.get_write_results_queue("fork")
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), engine.groups.dp_cp)
    dist_checkpointing.save(
        _sharded_state(engine, is_loading=False, with_rng=True),
        str(folder),
        sharded_strategy=strategy,
        content_metadata=dict(_METADATA),
    )


def load(engine: Engine, folder: Path, *, with_rng: bool) -> None:
    """Load weights and optimizer state of any layout; RNG states too where the layout is the same.

    Args:
        engine: a newly built engine.
        folder: a committed checkpoint.
        with_rng: restore every rank's RNG; only for the layout that saved it.

    Raises:
        RefusedError: another optimizer wrote it, or other parameter groups.

    Collective: every rank calls it.
    """
    safe_load.harden()
    optimizers.refuse_foreign_state(
        engine.config, engine.optimizer, load_common_state_dict(str(folder)).get("optimizer", {})
    )
    wanted = _sharded_state(engine, is_loading=True, with_rng=with_rng)
    names = _chunk_names(engine)
    without = {name: _leave_out_missing_fp8_state(wanted[name], folder) for name in names}
    state = dist_checkpointing.load(wanted, str(folder))
    for name, chunk in zip(names, engine.chunks, strict=True):
        missing, unexpected = chunk.module.load_state_dict(state[name], strict=False)
        if unexpected or set(missing) - without[name]:
            raise RuntimeError(f"{folder} does not fit the model: missing {missing}, unexpected {unexpected}")
    optimizers.load_state(engine.optimizer, state["optimizer"])
    if with_rng:
        set_rng_state(state["rng"])


def _sharded_state(engine: Engine, *, is_loading: bool, with_rng: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: chunk.module.sharded_state_dict(metadata=dict(_METADATA))
        for name, chunk in zip(_chunk_names(engine), engine.chunks, strict=True)
    }
    state["optimizer"] = engine.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=dict(_METADATA))
    if with_rng:
        state["rng"] = ShardedObject("rng", get_rng_state(), (dist.get_world_size(),), (dist.get_rank(),))
    return state


def _chunk_names(engine: Engine) -> list[str]:
    """Where the chunks stand in the state that is saved; tensors have names of their own, the same in all layouts."""
    return ["model"] if len(engine.chunks) == 1 else [f"model{number}" for number in range(len(engine.chunks))]


def _leave_out_missing_fp8_state(model: dict[str, Any], folder: Path) -> set[str]:
    """Do not ask for layers' FP8 state that the checkpoint lacks; returns the names that are left out.

    It was written on the CPU, or in another tensor-parallel layout: then amax histories begin anew, as at step 0.
    """
    wanted = {
        name: value.unique_key
        for name, value in model.items()
        if name.endswith("_extra_state") and isinstance(value, ShardedObject)
    }
    if not wanted:
        return set()
    there = load_sharded_metadata(str(folder))
    left_out = {name for name, unique_key in wanted.items() if unique_key not in there}
    for name in left_out:
        del model[name]
    return left_out


def get_rng_state() -> dict[str, Any]:
    """State of every generator of this rank, of tensors and plain numbers only (loadable with weights_only)."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {
            name: state.get_state() if isinstance(state, torch.Generator) else state
            for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
        },
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `get_rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
