"""The bytes of a checkpoint: sharded weights, optimizer state and RNG through megatron-core's dist_checkpointing.

Policy (folders, commit, retention, what to resume from) lives in `pretrain/checkpoint.py`; here is only what needs
megatron-core. The optimizer's format is written into the checkpoint, and a load goes by what is written there.
"""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_common_state_dict, load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from shardwright.conf.choices import OptimizerFormat
from shardwright.conf.problems import Problem, RefusedError
from shardwright.parallel.mcore import fp8_params, optimizers, safe_load
from shardwright.parallel.mcore.engine import Engine
from shardwright.parallel.mcore.shard_writer import ShardWriters

MAX_FILES, FILE_BYTES = 4, 1 << 30
"""A rank writes a file for each of so many bytes that fall to it, all at once, but no more files than this."""


def metadata_of(optimizer_format: OptimizerFormat) -> dict[str, Any]:
    """What megatron-core is told of the format, at saving and at loading, and what stands in the checkpoint."""
    return {"distrib_optim_sharding_type": optimizer_format.value, "chained_optim_avoid_prefix": True}


METADATA = metadata_of(OptimizerFormat.fully_reshardable)


def save(engine: Engine, folder: Path) -> dict[str, tuple[int, str]]:
    """Write this rank's shards into `folder`, which exists and is empty.

    Returns:
        Bytes and SHA-256 of this rank's files.

    Raises:
        OSError: a file of this rank could not be written.

    Collective: every rank calls it; returns when all ranks have written and synced their files.
    """
    writers = Saver(engine).begin(folder)
    writers.wait()
    failure = writers.failure()
    if failure is not None:
        raise OSError(failure)
    dist.barrier()
    return writers.finish()


class Saver:
    """Saves one engine again and again: who writes what is planned with the first two saves, and then reused.

    All ranks plan alike, since what an engine holds does not change. The first save is checked on all ranks: every part
    of every tensor is written once. The second one confirms the plan, and from the third on no rank talks to others
    before it has copied.

    Args:
        engine: what is saved.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._metadata = metadata_of(engine.config.checkpoint.optimizer_format)
        self._strategy: Any = TorchDistSaveShardedStrategy(thread_count=_num_files(engine), cached_metadata=True)
        if engine.groups.dp_cp.size() > 1:
            self._strategy = FullyParallelSaveStrategyWrapper(self._strategy, engine.groups.dp_cp, True)
        self._planned = False

    def begin(self, folder: Path) -> ShardWriters:
        """Copy what falls to this rank and begin to write it into `folder`, which exists and is empty.

        Collective: every rank calls it; training may go on as soon as it returns.
        """
        self._engine.gather_parameters()
        writers = ShardWriters(
            lambda: dist_checkpointing.save(
                _sharded_state(self._engine, self._metadata, is_loading=False, with_rng=True),
                str(folder),
                sharded_strategy=self._strategy,
                validate_access_integrity=not self._planned,
                content_metadata=self._metadata,
                async_sharded_save=True,
                async_strategy="mcore",
            )
        )
        self._planned = True
        return writers


def _num_files(engine: Engine) -> int:
    """Files that this rank writes at once: by what falls to it, and by the cores that it has."""
    memory = engine.memory()
    num_bytes = memory["weights_bytes"] // engine.layout.dp + memory["optimizer_bytes"]
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_FILES, cores, num_bytes // FILE_BYTES))


def load(engine: Engine, folder: Path, *, with_rng: bool) -> None:
    """Load weights and optimizer state of any layout; RNG states too where the layout is the same.

    A checkpoint that was made of somebody else's weights has weights alone: then the optimizer begins anew from them.

    Args:
        engine: a newly built engine.
        folder: a committed checkpoint.
        with_rng: restore every rank's RNG; only for the layout that saved it.

    Raises:
        RefusedError: another optimizer wrote it, or other parameter groups; it imports what none needs; it loads in the
            layout that wrote it alone, and this is another one.

    Collective: every rank calls it.
    """
    safe_load.harden()
    with safe_load.refusing(folder):
        safe_load.read_metadata(folder)  # torch would say of a refusal that there is no metadata
        common = load_common_state_dict(str(folder))
    if "optimizer" in common and _holds_buckets(common) and not with_rng:
        rule = f"{folder} holds the optimizer's buckets of another layout (dp_reshardable)"
        raise RefusedError([Problem(key="parallel", rule=rule, remedy="go on in the layout that wrote it")])
    wanted = _sharded_state(engine, common["content_metadata"], is_loading=True, with_rng=with_rng)
    names = _chunk_names(engine)
    if "optimizer" in common and not _holds_buckets(common):  # of these the groups are not known yet
        optimizers.refuse_foreign_state(engine.config, engine.optimizer, common["optimizer"])
    elif "optimizer" not in common:
        wanted = {name: wanted[name] for name in names}
    with safe_load.refusing(folder):
        without = {name: _leave_out_missing_fp8_state(wanted[name], folder) for name in names}
        if "own_amaxes" in wanted and wanted["own_amaxes"].unique_key not in load_sharded_metadata(str(folder)):
            del wanted["own_amaxes"]  # it was written with a larger `precision.amax_group`
        state = dist_checkpointing.load(wanted, str(folder))
    in_fp8 = any(fp8_params.is_in(chunk) for chunk in engine.chunks)
    for name, chunk in zip(names, engine.chunks, strict=True):
        for _ in range(2 if in_fp8 else 1):  # the first time brings the scales that the second one quantises with
            missing, unexpected = chunk.module.load_state_dict(state[name], strict=False)
        if unexpected or set(missing) - without[name]:
            raise RuntimeError(f"{folder} does not fit the model: missing {missing}, unexpected {unexpected}")
    if "optimizer" not in common:
        engine.optimizer.reload_model_params()
        return
    optimizers.load_state(engine.optimizer, state["optimizer"])
    if in_fp8:  # as after an update, from the main weights
        optimizers.give_weights(engine.optimizer)
        for chunk in engine.chunks:
            chunk.start_param_sync(force_sync=True)
    if with_rng:
        set_rng_state(state["rng"])
        engine.narrow.load_own_state(state.get("own_amaxes", {}))


def _holds_buckets(common: dict[str, Any]) -> bool:
    written: bool = common["content_metadata"] == metadata_of(OptimizerFormat.dp_reshardable)
    return written


def _sharded_state(engine: Engine, metadata: dict[str, Any], *, is_loading: bool, with_rng: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: chunk.module.sharded_state_dict(metadata=dict(metadata))
        for name, chunk in zip(_chunk_names(engine), engine.chunks, strict=True)
    }
    state["optimizer"] = engine.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=dict(metadata))
    for name in _chunk_names(engine):
        fp8_params.to_bf16(state[name])
    if with_rng:
        place = (dist.get_world_size(),), (dist.get_rank(),)
        state["rng"] = ShardedObject("rng", get_rng_state(), *place)
        if engine.narrow.keeps_own_state:
            state["own_amaxes"] = ShardedObject("own_amaxes", engine.narrow.own_state(), *place)
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
