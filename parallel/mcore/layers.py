"""Layer specs: Transformer Engine's layers on CUDA, megatron-core's local ones on the CPU; chosen by the device.

megatron-core's local spec lacks one thing that tensor parallelism needs: its norm (`WrappedTorchNorm`) refuses sequence
parallelism. `local_norm` is torch's norm with the mark by which `finalize_model_grads` sums the gradients over TP.
"""

from typing import Any

import torch
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from shardwright.parallel.mcore.emulated import EmulatedColumnParallelLinear, EmulatedRowParallelLinear


def local_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """torch's RMSNorm or LayerNorm with the `sequence_parallel` mark on its parameters."""
    norms: dict[str, type[torch.nn.Module]] = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
    norm = norms[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class LocalSpecs(backends.LocalSpecProvider):  # type: ignore[misc]
    """megatron-core's local modules, with a norm that works under sequence parallelism."""

    def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Builder of a norm."""
        return local_norm


class EmulatedSpecs(LocalSpecs):
    """The same, with linear layers whose products are emulated in a narrow format."""

    def column_parallel_linear(self) -> type:
        """The linear layer that splits its output."""
        return EmulatedColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """The linear layer that splits its input."""
        return EmulatedRowParallelLinear


def decoder_block_spec(
    config: TransformerConfig, device: torch.device, *, emulated: bool = False
) -> TransformerBlockSubmodules:
    """Spec of the decoder block for this device; emulated layers are local ones on every device."""
    if device.type == "cuda" and not emulated:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, normalization=config.normalization
        )
    # get_gpt_layer_local_submodules() finds both by their module-global names (gpt_layer_specs.py:359, 0.19.2)
    gpt_layer_specs.LocalSpecProvider = EmulatedSpecs if emulated else LocalSpecs
    gpt_layer_specs.LNImpl = local_norm
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
