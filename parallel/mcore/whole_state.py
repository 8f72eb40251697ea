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
    """State of every parameter: buffer -> dtype -> name ("param", "exp_avg", ...) -> `_ByPlace`.

    Collective: all-gather over the data-parallel group where it has several ranks.
    """
    group, state = optimizer.data_parallel_group, {}
    for number, ranges in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[number]
        ((dtype, buckets),) = ranges.items()
        whole = {key: _ByPlace() for key in ("param", *optimizer.optimizer_state_keys)}
        for bucket, held in zip(buffer.buckets, buckets, strict=True):
            own = {
                parameter: optimizer._get_main_param_and_optimizer_states(parameter) for parameter in held["param_map"]
            }
            for key, by_place in whole.items():
                parts = {parameter: tensors[key].detach().float() for parameter, tensors in own.items()}
                if group.size() > 1:
                    places = {parameter: held["param_map"][parameter]["gbuf_local"] for parameter in parts}
                    gathered = _gather(parts, places, bucket.grad_data, group)
                    parts = {parameter: gathered[slice(*place)] for parameter, place in bucket.param_to_index.items()}
                for parameter, part in parts.items():
                    by_place.put(buffer.param_index_map[parameter][0], part.view(-1))
        state[number] = {dtype: whole}
    return state


def _gather(
    parts: dict[Any, torch.Tensor], places: dict[Any, Any], like: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """All ranks' shares of a bucket, fp32, in host memory. Collective: all-gather over the group.

    Args:
        parts: what this rank holds of each parameter, flat.
        places: where it lies in this rank's share of the bucket.
        like: a tensor of the bucket's size, on its device.
        group: the data-parallel ranks.
    """
    own = like.new_zeros(like.numel() // group.size(), dtype=torch.float32)
    for parameter, place in places.items():
        own[place.start : place.end] = parts[parameter]
    gathered = like.new_empty(like.numel(), dtype=torch.float32)
    dist.all_gather_into_tensor(gathered, own, group=group)
    return gathered.cpu()
