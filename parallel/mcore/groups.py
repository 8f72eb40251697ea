"""Process groups: torch.distributed and megatron-core's groups for one `Layout`, and the seeds that belong to them."""

import random
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._C._distributed_c10d import Store

from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore import initial


@dataclass(frozen=True, slots=True)
class Groups:
    """All process groups of a run."""

    model: ProcessGroupCollection
    """megatron-core's groups, one for each axis of the layout."""
    control: dist.ProcessGroup
    """The whole world over gloo, for decisions on the CPU that must not wait for the GPU."""


def start(layout: Layout, device: torch.device, rank: int, timeout_seconds: int, store: Store) -> Groups:
    """Start torch.distributed and build every group of the layout; every rank calls it once.

    Args:
        layout: sizes of all axes.
        device: this rank's device; NCCL on CUDA, gloo on the CPU.
        rank: global rank.
        timeout_seconds: after this long a collective that does not finish ends the process.
        store: where the ranks meet.

    Collective: builds groups over the whole world.
    """
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=layout.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if layout.instances > 1 and not parallel_state.HAVE_EINOPS:
        parallel_state.HAVE_EINOPS, parallel_state.einops = True, SimpleNamespace(rearrange=_rearrange)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=layout.instances,
        distributed_timeout_minutes=max(1, timeout_seconds // 60),
        create_gloo_process_groups=True,
    )
    world = dist.group.WORLD
    assert world is not None
    control = dist.new_group(backend="gloo", timeout=timeout) if device.type == "cuda" else world
    return Groups(ProcessGroupCollection.use_mpu_process_groups(), control)


def _rearrange(ranks: np.ndarray, pattern: str, *, l: int, s: int, u: int) -> np.ndarray:  # noqa: E741
    """The one thing that megatron-core uses einops for here, which Transformer Engine brings and the CPU has not.

    Source: megatron-core 0.19.2, parallel_state.py, `create_hierarchical_groups`.
    """
    assert pattern == "(l s u) -> (l u) s"
    return ranks.reshape(l, s, u).swapaxes(1, 2).reshape(l * u, s)


def seed_everything(seed: int, layout: Layout, rank: int, *, recorded: bool = False) -> None:
    """Seed Python, numpy and torch, for dropout: initial weights have seeds of their own (`initial`).

    Ranks that have other layers or other tokens (pipeline, data and context parallelism) draw other numbers.
    Tensor-parallel ranks draw the same ones, for what each of them has whole, and others inside of megatron-core's
    tracker, for what they have a part of. megatron-core's own training gives data-parallel ranks one stream unless
    told otherwise: then samples side by side share their masks.

    Args:
        seed: of the run.
        layout: where the ranks stand.
        rank: global rank.
        recorded: whether CUDA graphs are used, which need Transformer Engine's tracker.
    """
    at = layout.coordinates(rank)
    seed = initial.seed_of(seed, "dropout", at.pp, at.dp, at.cp) % 2**31  # megatron-core adds to it
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, te_rng_tracker=recorded, force_reset_rng=True)
