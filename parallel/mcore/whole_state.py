"""The optimizer's state by parameter, for a save in the format `fully_reshardable`: gathered with the fewest copies.

megatron-core copies all of it five times on every rank, also where there is one data-parallel rank: into shards, into
what each rank is to receive, by the gather, into one tensor, and into another without the padding behind buckets. From
that last one it then cuts parameters at places that count the padding, so with several buckets (overlapped gradient
reduction) that end in padding it saves a parameter's state shifted. Source: megatron-core 0.19.2,
optimizer/distrib_optimizer.py:1262 and :1747 ("shouldn't hold and indicates a bug").

Here a parameter's state is what the optimizer holds itself where one rank holds it whole; else the gather of its bucket
is cut at the parameter's place in that bucket.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class _ByPlace:
    """Stands for one long tensor that is only ever cut at parameters: [start:end] -> flat tensor, by its start."""

    def __init__(self) -> None:
        self._parts: dict[int, torch.Tensor] = {}

    def put(self, start: int, part: torch.Tensor) -> None:
        self._parts[start] = part

    def __getitem__(self, place: slice) -> torch.Tensor:
        return self._parts[place.start]


def install() -> None:
    """Put ours in the place of megatron-core's gather when it saves; idempotent."""
    if getattr(DistributedOptimizer, "_gathers_whole_state", False):
        return
    gather = DistributedOptimizer.get_parameter_state_dp_zero

    def gather_or_take(
        self: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> Any:
        if empty_data or use_gloo_comm or not return_on_all_ranks:  # a load, or another format
            return gather(self, use_gloo_comm, empty_data, return_on_all_ranks)
        return _state(self)

    DistributedOptimizer.get_parameter_state_dp_zero = gather_or_take
    DistributedOptimizer._gathers_whole_state = True


def _state(optimizer: Any) -> dict[Any, Any]:
    """State of every parameter: buffer -> dtype -> name ("param", "exp_avg", ...) -> `_ByPlace` of fp32 tensors.

    Collective: all-gather over the data-parallel group where it has several ranks.
    """
    state: dict[Any, Any] = {}
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        ((dtype, buckets),) = ranges.items()
        whole = {key: _ByPlace() for key in ("param", *optimizer.optimizer_state_keys)}
        for bucket, held in zip(buffer.buckets, buckets, strict=True):
            fill = _take if optimizer.data_parallel_group.size() == 1 else _gather
            fill(optimizer, buffer.param_index_map, bucket, held["param_map"], whole)
        state[len(state)] = {dtype: whole}
    return state


def _take(optimizer: Any, starts: Any, bucket: Any, held: Any, whole: dict[str, _ByPlace]) -> None:
    """Put what the optimizer holds of a bucket's parameters, in fp32; what is made for that goes to the host."""
    made_here = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    for parameter in held:
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        for key, by_place in whole.items():
            tensor = tensors[key].detach().float().view(-1)
            by_place.put(starts[parameter][0], tensor.cpu() if made_here else tensor)


def _gather(optimizer: Any, starts: Any, bucket: Any, held: Any, whole: dict[str, _ByPlace]) -> None:
    """Put what all ranks hold of a bucket's parameters, in host memory. Collective: all-gather over the group."""
    group, num_elements = optimizer.data_parallel_group, bucket.grad_data.numel()
    shares = {key: torch.zeros(num_elements // group.size(), device="cpu") for key in whole}
    for parameter, ranges in held.items():
        place, tensors = ranges["gbuf_local"], optimizer._get_main_param_and_optimizer_states(parameter)
        for key, share in shares.items():
            share[place.start : place.end] = tensors[key].detach()
    for key, by_place in whole.items():
        gathered = bucket.grad_data.new_empty(num_elements, dtype=torch.float32)
        dist.all_gather_into_tensor(gathered, shares.pop(key).to(gathered.device), group=group)
        gathered = gathered.cpu()
        for parameter, (start, end) in bucket.param_to_index.items():
            by_place.put(starts[parameter][0], gathered[start:end])
