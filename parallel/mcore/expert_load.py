"""How evenly the routers share tokens out over experts, counted from their choices; it changes nothing of the training.

Every router of a rank sees other tokens or is another layer: sequence parallelism, which experts need with tensor
parallelism, context and data parallelism split the tokens, stages the layers. So one sum over all ranks counts every
choice once, in every layout. Layers are looked at one by one, each by shares, so that a layer whose forward pass is
computed again for its backward pass looks the same.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter


class ExpertLoad:
    """Counts of one engine; every rank has one, also where no layer of it has experts.

    Args:
        config: of the model.
        chunks: this rank's part of it.
        device: where it is.
    """

    def __init__(self, config: TransformerConfig, chunks: Sequence[torch.nn.Module], device: torch.device) -> None:
        num_experts = config.num_moe_experts or 0
        self._counts = torch.zeros(config.num_layers + (config.mtp_num_layers or 0), num_experts, device=device)
        if num_experts:
            for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
                layer = router.layer_number - 1 + (config.num_layers if router.is_mtp_layer else 0)
                router.register_forward_hook(partial(self._count, layer))

    def _count(self, layer: int, router: TopKRouter, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if router.training:
            self._counts[layer] += output[1].sum(0)  # the routing map [tokens, experts]

    def collect(self) -> dict[str, float]:
        """The load since the last call, and begin anew; nothing for a model without experts.

        Returns:
            `expert_load_max`: what the fullest expert of any layer had, in even shares; 1 where all have equally much,
            and at most the number of experts over `moe_router_topk`.
            `expert_load_entropy`: entropy of the shares over its largest value, the mean over layers; 1 is even.

        Collective: all-reduce(SUM) over the world, on every rank alike.
        """
        if not self._counts.numel():
            return {}
        dist.all_reduce(self._counts)
        load = shares(self._counts)
        self._counts.zero_()
        return load


def shares(counts: torch.Tensor) -> dict[str, float]:
    """What `collect` returns, of choices [layers, experts]; layers without any have no router."""
    counts = counts[counts.sum(1) > 0].double()
    if not counts.numel():
        return {}
    share = counts / counts.sum(1, keepdim=True)
    num_experts = counts.size(1)
    entropy = torch.special.entr(share).sum(1) / torch.tensor(num_experts, dtype=share.dtype).log()
    found = torch.stack([share.max() * num_experts, entropy.mean() if num_experts > 1 else share.max()])
    most, evenness = found.tolist()
    return {"expert_load_max": most, "expert_load_entropy": evenness}
