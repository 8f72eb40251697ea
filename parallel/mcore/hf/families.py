"""Families that can be exchanged with Hugging Face: name of the class there, table of weights, and its `config.json`.

A model belongs to the first family that says so. Everything that reads or writes files works with what stands here; a
further family is one more entry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.conf.choices import Activation, Normalization, PositionEmbedding
from shardwright.conf.problems import Problem, RefusedError
from shardwright.conf.schema_model import Model
from shardwright.parallel.mcore.hf.llama import LLAMA
from shardwright.parallel.mcore.hf.mapping import Row


@dataclass(frozen=True, slots=True)
class Family:
    """One of Hugging Face's model classes."""

    architecture: str
    rows: tuple[Row, ...]
    has: Callable[[Model], bool]
    """Whether it can express a model."""
    config: Callable[[Model], dict[str, Any]]
    """What its `config.json` says of a model."""


def _is_llama(model: Model) -> bool:
    return (
        model.normalization is Normalization.RMSNorm
        and model.position_embedding_type is PositionEmbedding.rope
        and model.activation_func is Activation.silu
        and model.gated_linear_unit
        and not (model.add_bias_linear or model.add_qkv_bias or model.qk_layernorm)
        and not (model.num_moe_experts or model.multi_latent_attention or model.mtp_num_layers)
    )


def _llama_config(model: Model) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.layernorm_epsilon,
        "rope_theta": float(model.rotary_base),
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **({"rope_scaling": _llama3_scaling(model)} if model.rope_scaling else {}),
    }


def _llama3_scaling(model: Model) -> dict[str, Any]:
    """Source: megatron-core 0.19.2, rotary_pos_embedding.py, _apply_scaling: all but the factor is fixed there."""
    return {
        "rope_type": "llama3",
        "factor": model.rope_scaling_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


FAMILIES = (Family("LlamaForCausalLM", LLAMA, _is_llama, _llama_config),)


def family_of(model: Model) -> Family:
    """The family that expresses `model`.

    Raises:
        RefusedError: none does.
    """
    for family in FAMILIES:
        if family.has(model):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    rule = "no family of Hugging Face's that is known here has this norm, activation, positions and biases"
    raise RefusedError([Problem(key="model", rule=rule, remedy=f"known are {known}")])
