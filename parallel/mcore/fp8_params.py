"""Parameters that are kept in FP8 (`precision.fp8_param_gather`), where they are drawn, saved and loaded: as BF16.

A checkpoint holds no FP8 weights, so that it loads with every recipe, and a weight that is drawn or loaded part by part
must not be quantised part by part.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor


def to_bf16(state: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Let a model's sharded state have BF16 tensors of the same values in the place of its FP8 ones.

    Returns:
        Every FP8 parameter, and what stands for it.
    """
    found = []
    for value in state.values():
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and is_float8tensor(value.data):
            quantized, value.data = value.data, value.data.dequantize()
            if isinstance(value, ShardedTensor):
                value.dtype = value.data.dtype
            found.append((quantized, value.data))
    return found


@torch.no_grad()
def quantize(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each FP8 parameter the values of its BF16 tensor, and a new optimizer those very values to begin from."""
    for quantized, plain in pairs:
        quantized.copy_(plain)
        if hasattr(quantized, "get_high_precision_init_val"):  # else main weights would begin from rounded ones
            quantized._high_precision_init_val = plain.cpu()  # type: ignore[attr-defined]


def is_in(module: torch.nn.Module) -> bool:
    """Whether a module has any."""
    return any(map(is_float8tensor, module.parameters()))
