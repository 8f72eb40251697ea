"""From our configuration to megatron-core's three config objects; the only place that knows both sets of names."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from shardwright.conf.choices import (
    Activation,
    CrossEntropy,
    CudaGraph,
    DType,
    OptimizerKind,
    PrecisionBackend,
    StateDType,
)
from shardwright.conf.schema import Config
from shardwright.parallel.layout import Layout

DTYPES: dict[Enum, torch.dtype] = {
    kind: {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind.value]
    for kind in [*DType, *StateDType]
}
ACTIVATIONS = {Activation.silu: F.silu, Activation.gelu: F.gelu}


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
        }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization.value,
        layernorm_epsilon=model.layernorm_epsilon,
        activation_func=ACTIVATIONS[model.activation_func],
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
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        # the loss is a sum over tokens, divided once by the tokens of the whole global batch
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu,
        **_execution(config, on_gpu=on_gpu),
        recompute_granularity=None if model.recompute_granularity is None else model.recompute_granularity.value,
        recompute_method=None if model.recompute_method is None else model.recompute_method.value,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=list(model.recompute_modules),
        **narrow,
    )


def _execution(config: Config, *, on_gpu: bool) -> dict[str, Any]:
    """Kernels and memory; what is not chosen is on where the device has it."""

    def chosen(choice: bool | None) -> bool:
        return on_gpu if choice is None else choice

    execution = config.execution
    loss, layers = execution.cross_entropy, execution.cpu_offloading_num_layers
    if loss is CrossEntropy.auto:
        # Transformer Engine's takes fp32 and bf16
        fused = on_gpu and not execution.deterministic_mode and config.precision.dtype is not DType.fp16
        loss = CrossEntropy.transformer_engine if fused else CrossEntropy.unfused
    return {
        "attention_backend": AttnBackend[execution.attention_backend.name],
        "bias_activation_fusion": chosen(execution.bias_activation_fusion),
        "bias_dropout_fusion": chosen(execution.bias_dropout_fusion),
        "masked_softmax_fusion": False,  # megatron-core's own kernel; Transformer Engine's attention has its own
        "apply_rope_fusion": chosen(execution.apply_rope_fusion),
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
