"""Families that can be exchanged with Hugging Face: name of the class there, table of weights, and its `config.json`.

A model belongs to the first family that says so. Everything that reads or writes files works with what stands here; a
further family is one more entry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.conf.choices import Activation, Normalization, PositionEmbedding, RopeType, ScoreFunction
from shardwright.conf.problems import Problem, RefusedError
from shardwright.conf.schema_model import Model
from shardwright.parallel.mcore.hf import configs
from shardwright.parallel.mcore.hf.deepseek import DEEPSEEK_V3
from shardwright.parallel.mcore.hf.gpt import GPT
from shardwright.parallel.mcore.hf.llama import LLAMA
from shardwright.parallel.mcore.hf.mapping import Row
from shardwright.parallel.mcore.hf.mixtral import MIXTRAL
from shardwright.parallel.mcore.hf.qwen3 import QWEN3, QWEN3_MOE


@dataclass(frozen=True, slots=True)
class Family:
    """One of Hugging Face's model classes."""

    architecture: str
    rows: tuple[Row, ...]
    has: Callable[[Model], bool]
    """Whether it can express a model."""
    config: Callable[[Model], dict[str, Any]]
    """What its `config.json` says of a model."""


def _is_modern(model: Model) -> bool:
    """RMSNorm, rotary positions, SwiGLU, no biases: what all families but GPT share."""
    return (
        model.normalization is Normalization.RMSNorm
        and model.position_embedding_type is PositionEmbedding.rope
        and model.activation_func is Activation.silu
        and model.gated_linear_unit
        and not (model.add_bias_linear or model.add_qkv_bias)
    )


def _has_plain_experts(model: Model) -> bool:
    """Chosen by a softmax, without groups, scaling, bias or shared ones."""
    return (
        model.num_moe_experts is not None
        and model.moe_router_score_function is ScoreFunction.softmax
        and not (model.moe_router_num_groups or model.moe_router_topk_scaling_factor)
        and not (model.moe_router_enable_expert_bias or model.moe_shared_expert_intermediate_size)
    )


def _is_plain(model: Model) -> bool:
    return _is_modern(model) and not (model.multi_latent_attention or model.mtp_num_layers)


def _is_llama(model: Model) -> bool:
    return _is_plain(model) and not (model.qk_layernorm or model.num_moe_experts)


def _is_qwen3(model: Model) -> bool:
    return _is_plain(model) and model.qk_layernorm and not model.num_moe_experts


def _is_qwen3_moe(model: Model) -> bool:
    return _is_plain(model) and model.qk_layernorm and _has_plain_experts(model)


def _is_mixtral(model: Model) -> bool:
    weighted_alike = not model.moe_router_pre_softmax
    every_layer = all(model.moe_layers) and not (model.qk_layernorm or model.rope_scaling)
    return _is_plain(model) and _has_plain_experts(model) and every_layer and weighted_alike


def _is_deepseek_v3(model: Model) -> bool:
    layers, width, shared = model.moe_layers, model.moe_ffn_hidden_size, model.moe_shared_expert_intermediate_size
    return (
        _is_modern(model)
        and model.multi_latent_attention
        and model.qk_layernorm
        and model.q_lora_rank is not None
        and model.rope_type is RopeType.yarn
        and any(layers)
        and list(layers) == sorted(layers)  # the dense ones first
        and model.moe_router_score_function is ScoreFunction.sigmoid
        and model.moe_router_enable_expert_bias
        and None not in (model.moe_router_num_groups, model.moe_router_topk_scaling_factor)
        and bool(width and shared)
        and (shared or 0) % (width or 1) == 0
    )


def _is_gpt2(model: Model) -> bool:
    return (
        model.normalization is Normalization.LayerNorm
        and model.position_embedding_type is PositionEmbedding.learned_absolute
        and model.activation_func is Activation.gelu_tanh
        and model.add_bias_linear
        and not (model.gated_linear_unit or model.qk_layernorm)
        and model.num_query_groups == model.num_attention_heads
        and model.kv_channels * model.num_attention_heads == model.hidden_size
        and not (model.num_moe_experts or model.multi_latent_attention or model.mtp_num_layers)
    )


FAMILIES = (
    Family("LlamaForCausalLM", LLAMA, _is_llama, configs.llama),
    Family("Qwen3ForCausalLM", QWEN3, _is_qwen3, configs.qwen3),
    Family("Qwen3MoeForCausalLM", QWEN3_MOE, _is_qwen3_moe, configs.qwen3_moe),
    Family("MixtralForCausalLM", MIXTRAL, _is_mixtral, configs.mixtral),
    Family("DeepseekV3ForCausalLM", DEEPSEEK_V3, _is_deepseek_v3, configs.deepseek_v3),
    Family("GPT2LMHeadModel", GPT, _is_gpt2, configs.gpt2),
)
"""DeepSeek-V3 alone takes a model with multi-token prediction, and leaves those layers out: transformers has none."""


def family_of(model: Model) -> Family:
    """The family that expresses `model`.

    Raises:
        RefusedError: none does.
    """
    for family in FAMILIES:
        if family.has(model):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    rule = "no family of Hugging Face's that is known here has this norm, activation, positions, biases and experts"
    raise RefusedError([Problem(key="model", rule=rule, remedy=f"known are {known}")])
