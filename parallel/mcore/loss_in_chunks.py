"""Output layer and loss in pieces of the sequence: logits of all tokens never exist at once.

Logits are by far the widest activation: 8192 tokens x 128256 entries are 2 GiB in bf16, 4 in fp32, and their gradients
as much again. Here each piece's logits live while its losses are computed, and once more in the backward pass, which
computes them again (`torch.utils.checkpoint`): that costs one more product of the output layer. megatron-core 0.19.2
has no such loss; it lets a caller replace what follows the last layer (`output_processor` of `GPTModel.forward`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def loss_in_chunks(num_chunks: int, sp_size: int) -> Callable[..., torch.Tensor]:
    """What `GPTModel.forward` takes as its `output_processor` while it trains.

    Args:
        num_chunks: pieces; divides the part of the sequence that a rank holds.
        sp_size: ranks that share a sequence outside of attention and MLP (TP with sequence parallelism), else 1.

    Returns:
        A function from the last hidden states [S / sp_size, B, H] and labels [B, S] to the losses [B, S].
    """
    return partial(_losses, num_chunks, sp_size)


def _losses(
    num_chunks: int,
    sp_size: int,
    *,
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    **_: Any,
) -> torch.Tensor:
    # The output layer gathers a piece of every rank's part of the sequence, so a piece's tokens lie apart in `labels`.
    num_samples, seq_length = labels.shape
    pieces_BPCS = labels.view(num_samples, sp_size, num_chunks, -1)

    def losses_of(hidden_SBH: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        logits, _ = output_layer(hidden_SBH, weight=output_weight)
        return compute_language_model_loss(labels_BS, logits)

    losses = [
        checkpoint(
            losses_of,
            hidden_SBH,
            pieces_BPCS[:, :, number].reshape(num_samples, -1),
            use_reentrant=False,
            preserve_rng_state=False,  # nothing random follows the last layer
        ).view(num_samples, sp_size, 1, -1)
        for number, hidden_SBH in enumerate(hidden_states.chunk(num_chunks))
    ]
    return torch.cat(losses, dim=2).view(num_samples, seq_length)
