"""Gathering and summing parts of unequal size over gloo: experts that are split over ranks (ETP) get unequal tokens.

megatron-core leaves that to NCCL, whose all-gather and reduce-scatter of lists take tensors of any sizes. gloo's want
equal ones. Here parts are padded to the largest to be gathered; to be scattered, the sum of all is made everywhere and
every rank keeps its part. That sends more than is needed, which on the CPU nobody minds.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings


def install() -> None:
    """Put ours in the place of megatron-core's wherever parts have sizes of their own; idempotent.

    Source: megatron-core 0.19.2, tensor_parallel/mappings.py.
    """
    if getattr(mappings, "_takes_uneven_parts", False):
        return
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_any(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            whole: torch.Tensor = gather(input_, group, output_split_sizes, *args)
            return whole
        return _gather(input_, group, output_split_sizes)

    def reduce_scatter_any(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            part: torch.Tensor = reduce_scatter(input_, group, input_split_sizes, *args)
            return part
        return _reduce_scatter(input_, group, input_split_sizes)

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_any, reduce_scatter_any
    mappings._takes_uneven_parts = True


def _gather(own: torch.Tensor, group: dist.ProcessGroup, sizes: list[int]) -> torch.Tensor:
    """All ranks' parts [sizes[rank], ...] one behind the other. Collective: all-gather over the group."""
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: own.size(0)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter(whole: torch.Tensor, group: dist.ProcessGroup, sizes: list[int]) -> torch.Tensor:
    """This rank's part [sizes[rank], ...] of the sum. Collective: all-reduce(SUM) over the group."""
    total = whole.clone()
    dist.all_reduce(total, group=group)
    own: torch.Tensor = total.split(sizes)[group.rank()].clone()
    return own
