"""Context parallelism: which pieces of a sequence a rank has, and attention over all of them without TE.

A sequence is cut into 2 * CP pieces; rank r has the pieces r and 2 * CP - 1 - r, so that under a causal mask all ranks
have equally much to do (megatron-core 0.19.2, utils.py `get_batch_on_this_cp_rank`, and Transformer Engine).
Transformer Engine's attention passes keys and values around the ranks by itself. megatron-core's local attention
refuses to run in parts: `ContextAttention` gathers keys and values of the whole sequence and masks by position.
"""

import copy
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from shardwright.data.loader import Batch


def own_pieces(batch: Batch, cp_size: int, cp_rank: int) -> Batch:
    """The tokens [B, S / CP] of one context-parallel rank, in the order of the sequence.

    Args:
        batch: tensors [B, S] of the whole sequences.
        cp_size, cp_rank: context-parallel ranks, and which one this is.
    """
    if cp_size == 1:
        return batch
    pieces = {name: tensor.chunk(2 * cp_size, dim=1) for name, tensor in batch.items()}
    return {name: torch.cat([own[cp_rank], own[-1 - cp_rank]], dim=1) for name, own in pieces.items()}


class ContextAttention(DotProductAttention):  # type: ignore[misc]
    """megatron-core's unfused causal attention, where every rank has two pieces of the sequence.

    Collective: all-gather of keys and values over cp in the forward pass, reduce-scatter in the backward one.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # all that the base does with it is to refuse
        super().__init__(alone, *args, **kwargs)
        self.config = config

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Context [S / CP, B, heads * channels] of query, key and value [S / CP, B, heads, channels]."""
        group = self.pg_collection.cp
        if group.size() > 1:
            assert attention_mask is None, "the mask is made here, from positions"
            positions = [_positions(rank, group.size(), query.size(0), query.device) for rank in range(group.size())]
            # [1, 1, S / CP, S]: true where a key stands behind its query
            attention_mask = (torch.cat(positions) > positions[group.rank()][:, None])[None, None]
            key, value = (gather_from_sequence_parallel_region(part.contiguous(), group=group) for part in (key, value))
        context: torch.Tensor = super().forward(query, key, value, attention_mask, *args, **kwargs)
        return context


def _positions(cp_rank: int, cp_size: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Positions [S / CP] in the sequence of a rank's tokens."""
    piece = torch.arange(num_tokens // 2, device=device)
    return torch.cat([piece + place * (num_tokens // 2) for place in (cp_rank, 2 * cp_size - 1 - cp_rank)])
