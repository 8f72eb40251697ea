"""From our configuration to megatron-core's three config objects; the only place that knows both sets of names."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from shardwright.conf.choices import Activation, DType, RopeType, StateDType
from shardwright.conf.schema import Config
from shardwright.conf.schema_model import Model
from shardwright.parallel.layout import Layout

DTYPES: dict[Enum, torch.dtype] = {
    kind: {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind.value]
    for kind in [*DType, *StateDType]
}
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.silu: F.silu,
    Activation.gelu: F.gelu,
    Activation.gelu_tanh: partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class MegatronConfigs:
    """megatron-core's configs of one run."""

    transformer: TransformerConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig


def megatron_configs(config: Config, layout: Layout, device: torch.device) -> MegatronConfigs:
    """Translate; fused kernels are on where the device has them."""
    return MegatronConfigs(
        transformer=_transformer(config, layout, device), ddp=_ddp(config), optimizer=_optimizer(config)
    )


def _transformer(config: Config, layout: Layout, device: torch.device) -> TransformerConfig:
    model, precision = config.model, config.precision
    dtype, on_gpu = DTYPES[precision.dtype], device.type == "cuda"
    narrow: dict[str, Any] = {}
    if precision.fp4 is not None:
        narrow = {"fp4": precision.fp4.value}
    if precision.fp8 is not None:
        narrow = {
            "fp8": precision.fp8.value,
            "fp8_recipe": precision.fp8_recipe.value,
            "fp8_margin": precision.fp8_margin,
            "fp8_amax_history_len": precision.fp8_amax_history_len,
            "fp8_amax_compute_algo": precision.fp8_amax_compute_algo.value,
        }
    kind, attention = (
        (MLATransformerConfig, _latent(model)) if model.multi_latent_attention else (TransformerConfig, {})
    )
    activation, fused = _activation(model, on_gpu)
    return kind(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization.value,
        layernorm_epsilon=model.layernorm_epsilon,
        activation_func=activation,
        gated_linear_unit=model.gated_linear_unit,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=config.parallel.sp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        # the loss is a sum over tokens, divided once by the tokens of the whole global batch
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu,
        transformer_impl="transformer_engine" if on_gpu else "local",
        mtp_num_layers=model.mtp_num_layers,
        **({} if model.mtp_num_layers is None else {"mtp_loss_scaling_factor": model.mtp_loss_scaling_factor}),
        # fused kernels
        bias_activation_fusion=fused,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,  # megatron-core's own kernel; Transformer Engine's attention has its own
        # megatron-core's fused kernel for latent attention knows YaRN alone
        apply_rope_fusion=on_gpu and model.rope_type is not RopeType.rope,
        persist_layer_norm=on_gpu,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=on_gpu,
        cross_entropy_fusion_impl="te" if on_gpu else "native",
        recompute_granularity=None if model.recompute_granularity is None else model.recompute_granularity.value,
        recompute_method=None if model.recompute_method is None else model.recompute_method.value,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=list(model.recompute_modules),
        **attention,
        **_experts(model, on_gpu),
        **narrow,
    )


def _activation(model: Model, on_gpu: bool) -> tuple[Callable[[torch.Tensor], torch.Tensor], bool]:
    """The activation function, and whether megatron-core fuses it with the bias.

    Its fused kernels are SwiGLU and the tanh form of GELU, which they run under the name `F.gelu` (fused_bias_gelu.py,
    fused_bias_geglu.py); experts fuse SwiGLU alone (experts.py).
    """
    kind, gated = model.activation_func, model.gated_linear_unit
    tanh_is_fused = model.num_moe_experts is None and (gated or model.add_bias_linear)
    if on_gpu and kind is Activation.gelu_tanh and tanh_is_fused:
        return F.gelu, True
    return ACTIVATIONS[kind], on_gpu and kind is Activation.silu and gated


def _experts(model: Model, on_gpu: bool) -> dict[str, Any]:
    """Settings of MoE layers; none for a dense model."""
    if model.num_moe_experts is None:
        return {}
    dtype = model.moe_router_dtype
    return {
        "num_moe_experts": model.num_moe_experts,
        "moe_layer_freq": [int(has_experts) for has_experts in model.moe_layers],
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_score_function": model.moe_router_score_function.value,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_num_groups": model.moe_router_num_groups,
        "moe_router_group_topk": model.moe_router_group_topk,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_router_enable_expert_bias": model.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": model.moe_router_bias_update_rate,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type.value,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_router_dtype": None if dtype is None else dtype.value,
        "moe_token_dispatcher_type": model.moe_token_dispatcher_type.value,
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": model.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": model.moe_token_drop_policy.value,
        "moe_router_padding_for_quantization": model.moe_router_padding_for_quantization,
        # Transformer Engine's kernels
        "moe_grouped_gemm": model.moe_grouped_gemm and on_gpu,
        "moe_permute_fusion": model.moe_permute_fusion and on_gpu,
        "moe_router_fusion": model.moe_router_fusion and on_gpu,
    }


def _latent(model: Model) -> dict[str, Any]:
    """Settings of multi-head latent attention."""
    plain = model.rope_type is not RopeType.yarn
    widths = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    yarn = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return {
        "multi_latent_attention": True,
        "rope_type": "rope" if plain else "yarn",
        "rotary_base": model.rotary_base,
        # attention divides its logits by a function of this factor, with plain positions too: 1 leaves them alone
        "rotary_scaling_factor": 1.0 if plain else model.rotary_scaling_factor,
        **{name: getattr(model, name) for name in (*widths, *(() if plain else yarn))},
    }


def _ddp(config: Config) -> DistributedDataParallelConfig:
    # always the distributed optimizer: on one data-parallel rank it costs nothing, and its checkpoints, which do not
    # interchange with the plain optimizer's, then load in every layout
    parallel = config.parallel
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.precision.grad_reduce_in_fp32,
        use_distributed_optimizer=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )


def _optimizer(config: Config) -> OptimizerConfig:
    optimizer, precision, dtype = config.optimizer, config.precision, DTYPES[config.precision.dtype]
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        use_precision_aware_optimizer=optimizer.use_precision_aware_optimizer,
        main_grads_dtype=DTYPES[optimizer.main_grads_dtype],
        exp_avg_dtype=DTYPES[optimizer.exp_avg_dtype],
        exp_avg_sq_dtype=DTYPES[optimizer.exp_avg_sq_dtype],
        fp8_recipe=None if precision.fp8 is None else precision.fp8_recipe.value,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
