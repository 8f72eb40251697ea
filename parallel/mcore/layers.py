"""Layer specs: Transformer Engine's layers on CUDA, megatron-core's local ones on the CPU; chosen by the device.

megatron-core's local modules lack five things, which are added here:

* their norm (`WrappedTorchNorm`) refuses sequence parallelism: `local_norm` is torch's norm with the mark by which
  `finalize_model_grads` sums the gradients over TP;
* their core attention refuses context parallelism: `context.ContextAttention`;
* it takes heads of one width alone, latent attention has two: `LocalAttention`;
* latent attention has wrong gradients under tensor parallelism: `LocalLatentAttention`;
* a layer's names in checkpoints are Transformer Engine's for dense layers without latent attention only: `_named`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, mappings
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from shardwright.parallel.mcore import uneven_parts
from shardwright.parallel.mcore.context import ContextAttention
from shardwright.parallel.mcore.emulated import EmulatedColumnParallelLinear, EmulatedRowParallelLinear


def local_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """torch's RMSNorm or LayerNorm with the `sequence_parallel` mark on its parameters."""
    norms: dict[str, type[torch.nn.Module]] = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
    norm = norms[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class LocalAttention(ContextAttention):
    """megatron-core's unfused attention, also for value heads of another width than the keys'.

    Args:
        v_channels: width of a value head, where it is not that of the keys.
    """

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            # read for the shape of the output alone (dot_product_attention.py:263); the scale comes from the caller
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LocalLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """megatron-core's latent attention with right gradients under tensor parallelism.

    With column-parallel down projections (all that a local spec may use) the ranks gather the compressed keys' rotary
    part, and each feeds it to its own heads. The gather's backward passes a rank its own gradient only, so those of the
    other ranks' heads were lost (multi_latent_attention.py, 0.19.2).
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None and not config.sequence_parallel:
            # finalize_model_grads sums every `q_layernorm` over TP, which suits norms per head; here each rank has the
            # whole gradient (finalize_model_grads.py:453)
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, kv = super()._qkv_down_projection(hidden_states)
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        if kv.size(-1) != sum(widths):
            kv = mappings.gather_from_tensor_model_parallel_region(kv)
            if self.config.sequence_parallel:  # the base gathers the rotary part again, and that backward sums
                kv = mappings.scatter_to_sequence_parallel_region(kv)
            else:
                compressed, rotary = kv.split(widths, -1)
                kv = torch.cat([compressed, mappings.copy_to_tensor_model_parallel_region(rotary)], -1)
        return q, kv


class LocalSpecs(backends.LocalSpecProvider):  # type: ignore[misc]
    """megatron-core's local modules, with a norm that works under sequence parallelism."""

    def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Builder of a norm."""
        return local_norm

    def core_attention(self) -> type:
        """Class of the attention between projections."""
        return LocalAttention


class EmulatedSpecs(LocalSpecs):
    """The same, with linear layers whose products are emulated in a narrow format."""

    def column_parallel_linear(self) -> type:
        """The linear layer that splits its output."""
        return EmulatedColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """The linear layer that splits its input."""
        return EmulatedRowParallelLinear

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """The experts of a rank; megatron-core's local ones name its own linear layers (backends.py:133)."""
        linear = {"linear_fc1": EmulatedColumnParallelLinear, "linear_fc2": EmulatedRowParallelLinear}
        return partial(SequentialMLP, submodules=MLPSubmodules(activation_func=self.activation_func(), **linear))


def decoder_block_spec(
    config: TransformerConfig, device: torch.device, vp_stage: int | None = None, *, emulated: bool = False
) -> TransformerBlockSubmodules:
    """Spec of the decoder block for this device; of one model chunk where a pipeline rank has several.

    Emulated layers are local ones on every device.
    """
    if device.type == "cuda" and not emulated:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, normalization=config.normalization, vp_stage=vp_stage
        )
    _use_local_modules(emulated)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    return replace(block, layer_specs=[_named(layer, config) for layer in block.layer_specs])


def mtp_block_spec(
    config: TransformerConfig, device: torch.device, vp_stage: int | None = None, *, emulated: bool = False
) -> MultiTokenPredictionBlockSubmodules | None:
    """Spec of the layers of multi-token prediction, which are made as the last layer is; None without them."""
    if config.mtp_num_layers is None:
        return None
    on_gpu = device.type == "cuda" and not emulated
    if not on_gpu:
        _use_local_modules(emulated)
    # of all stages: this one may have no layer of the decoder
    last = gpt_layer_specs.get_gpt_decoder_layer_specs(config, on_gpu, config.normalization)[-1]
    layer = last if on_gpu else _named(last, config)
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=on_gpu, vp_stage=vp_stage)


def _use_local_modules(emulated: bool) -> None:
    """Put ours in the place of megatron-core's, which finds them by their module-global names."""
    gpt_layer_specs.LocalSpecProvider = EmulatedSpecs if emulated else LocalSpecs
    gpt_layer_specs.LNImpl = local_norm
    gpt_layer_specs.MLASelfAttention = LocalLatentAttention
    # latent attention asks whether its down projections are of this very class (multi_latent_attention.py:527)
    multi_latent_attention.ColumnParallelLinear = EmulatedColumnParallelLinear if emulated else ColumnParallelLinear
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_on_cpu
    uneven_parts.install()


def _splits_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """How many tokens go where, as the dispatcher wants it; megatron-core makes that of CUDA tensors only.

    Source: moe_utils.py:1169, 0.19.2.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _named(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """The local layer with the names in checkpoints that Transformer Engine's layer of this kind has.

    Transformer Engine fuses a norm into the linear layer behind it, and into nothing else: there is none behind the
    norms before experts and before latent attention.
    """
    names: dict[str, str] = {}
    if config.multi_latent_attention:
        names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    has_experts = getattr(layer.submodules.mlp, "func", None) is MoELayer
    if not has_experts:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(module=layer.module, submodules=replace(layer.submodules, sharded_state_dict_keys_map=names))
