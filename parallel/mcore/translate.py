"""From our configuration to megatron-core's three config objects; the only place that knows both sets of names."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from shardwright.conf.choices import Activation, DType, StateDType
from shardwright.conf.schema import Config
from shardwright.parallel.layout import Layout
from shardwright.parallel.stages import Split

DTYPES: dict[Enum, torch.dtype] = {
    kind: {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind.value]
    for kind in [*DType, *StateDType]
}
LAYERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
"""A letter of `parallel.stages` -> megatron-core's name of what it stands for."""
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
        # fused kernels
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,  # megatron-core's own kernel; Transformer Engine's attention has its own
        apply_rope_fusion=on_gpu,
        persist_layer_norm=on_gpu,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=on_gpu,
        cross_entropy_fusion_impl="te" if on_gpu else "native",
        recompute_granularity=None if model.recompute_granularity is None else model.recompute_granularity.value,
        recompute_method=None if model.recompute_method is None else model.recompute_method.value,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=list(model.recompute_modules),
        **narrow,
    )


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
