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
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

from shardwright.conf.choices import (
    Activation,
    CrossEntropy,
    CudaGraph,
    DType,
    OptimizerKind,
    PrecisionBackend,
    RopeType,
    StateDType,
)
from shardwright.conf.schema import Config
from shardwright.conf.schema_model import Model
from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore import initial
from shardwright.parallel.stages import Split

DTYPES: dict[Enum, torch.dtype] = {
    kind: {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind.value]
    for kind in [*DType, *StateDType]
}
LAYERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
"""A letter of `parallel.stages` -> megatron-core's name of what it stands for."""
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
    is_hardware = precision.backend is PrecisionBackend.transformer_engine
    if precision.fp4 is not None and is_hardware:
        narrow = {"fp4": precision.fp4.value}
    if precision.fp8 is not None and is_hardware:
        narrow = {
            "fp8": precision.fp8.value,
            "fp8_recipe": precision.fp8_recipe.value,
            "fp8_margin": precision.fp8_margin,
            "fp8_amax_history_len": precision.fp8_amax_history_len,
            "fp8_amax_compute_algo": precision.fp8_amax_compute_algo.value,
            "fp8_dot_product_attention": precision.fp8_dot_product_attention,
            "fp8_param": precision.fp8_param_gather,
        }
    kind, attention = (
        (MLATransformerConfig, _latent(model)) if model.multi_latent_attention else (TransformerConfig, {})
    )
    return kind(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization.value,
        layernorm_epsilon=model.layernorm_epsilon,
        gated_linear_unit=model.gated_linear_unit,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        # `initial` draws the weights once the model is built
        init_method=initial.leave,
        output_layer_init_method=initial.leave,
        embedding_init_method=initial.leave,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=config.parallel.sp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        **_pipeline(config, layout),
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
        **_execution(config, on_gpu=on_gpu),
        recompute_granularity=None if model.recompute_granularity is None else model.recompute_granularity.value,
        recompute_method=None if model.recompute_method is None else model.recompute_method.value,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=list(model.recompute_modules),
        **attention,
        **_experts(model, on_gpu),
        **narrow,
    )


def _execution(config: Config, *, on_gpu: bool) -> dict[str, Any]:
    """Kernels and memory; what is not chosen is on where the device has it."""

    def chosen(choice: bool | None) -> bool:
        return on_gpu if choice is None else choice

    execution, model = config.execution, config.model
    loss, layers = execution.cross_entropy, execution.cpu_offloading_num_layers
    if loss is CrossEntropy.auto:
        # Transformer Engine's takes fp32 and bf16
        fused = on_gpu and not execution.deterministic_mode and config.precision.dtype is not DType.fp16
        loss = CrossEntropy.transformer_engine if fused else CrossEntropy.unfused
    fused_activation = model.has_fused_activation and chosen(execution.bias_activation_fusion)
    # the fused kernel of GELU is the tanh form, which megatron-core runs under the name `F.gelu` (fused_bias_gelu.py)
    tanh_is_fused = fused_activation and model.activation_func is Activation.gelu_tanh
    return {
        "attention_backend": AttnBackend[execution.attention_backend.name],
        "activation_func": F.gelu if tanh_is_fused else ACTIVATIONS[model.activation_func],
        "bias_activation_fusion": fused_activation,
        "bias_dropout_fusion": chosen(execution.bias_dropout_fusion),
        "masked_softmax_fusion": False,  # megatron-core's own kernel; Transformer Engine's attention has its own
        "apply_rope_fusion": model.has_fused_rope and chosen(execution.apply_rope_fusion),
        "persist_layer_norm": on_gpu,
        "gradient_accumulation_fusion": chosen(execution.gradient_accumulation_fusion),
        "cross_entropy_loss_fusion": loss is not CrossEntropy.unfused,
        "cross_entropy_fusion_impl": "te" if loss is CrossEntropy.transformer_engine else "native",
        "cpu_offloading": layers > 0,
        "cpu_offloading_num_layers": layers,
        "cpu_offloading_weights": False,
        "cuda_graph_impl": execution.cuda_graph_impl.value,
        "cuda_graph_modules": [],  # of a recorded layer everything
        "use_te_rng_tracker": execution.cuda_graph_impl is not CudaGraph.none,
        "deterministic_mode": execution.deterministic_mode,
    }


def _pipeline(config: Config, layout: Layout) -> dict[str, Any]:
    """Stages and chunks. Every uneven split is written out: `parallel.stages` says why."""
    split = Split.of(config)
    written: list[list[str]] | None = None
    if split.is_uneven:
        stages = split.stages()
        written = [[LAYERS[letter] for letter in chunk.letters] for row in zip(*stages, strict=True) for chunk in row]
    interleaved = layout.vpp > 1
    return {
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "pipeline_model_parallel_layout": written,
        # with batched communication interleaved stages have wrong gradients over gloo
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


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
        fp8_param_gather=config.precision.fp8_param_gather,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        num_distributed_optimizer_instances=parallel.num_distributed_optimizer_instances,
    )


def _optimizer(config: Config) -> OptimizerConfig:
    optimizer, precision, dtype = config.optimizer, config.precision, DTYPES[config.precision.dtype]
    by_layer = optimizer.optimizer is OptimizerKind.muon
    return OptimizerConfig(
        optimizer=optimizer.optimizer.value,
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        sgd_momentum=optimizer.sgd_momentum,
        muon_momentum=optimizer.muon_momentum,
        muon_nesterov=optimizer.muon_nesterov,
        muon_num_ns_steps=optimizer.muon_num_ns_steps,
        muon_coefficient_type=optimizer.muon_coefficient_type.value,
        muon_fp32_matmul_prec=optimizer.muon_fp32_matmul_prec.value,
        muon_scale_mode=optimizer.muon_scale_mode.value,
        muon_extra_scale_factor=optimizer.muon_extra_scale_factor,
        muon_split_qkv=optimizer.muon_split_qkv,
        muon_tp_mode=optimizer.muon_tp_mode.value,
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
        use_distributed_optimizer=not by_layer,
        use_layer_wise_distributed_optimizer=by_layer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
