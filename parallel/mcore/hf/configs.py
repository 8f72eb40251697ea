"""What Hugging Face's `config.json` says of a `Model`, by family; the values of an architecture and nothing beside."""

from typing import Any

from shardwright.conf.choices import RopeType
from shardwright.conf.schema_model import Model


def llama(model: Model) -> dict[str, Any]:
    """Also what Qwen3, Mixtral and DeepSeek-V3 say of their dense part."""
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
        "rope_scaling": _llama3_scaling(model) if model.rope_scaling else None,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def qwen3(model: Model) -> dict[str, Any]:
    """Dense Qwen3."""
    return {
        **_without(llama(model), "mlp_bias"),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": False,
    }


def qwen3_moe(model: Model) -> dict[str, Any]:
    """Qwen3 with experts."""
    return {
        **qwen3(model),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": model.num_moe_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in enumerate(model.moe_layers) if not has_experts],
    }


def mixtral(model: Model) -> dict[str, Any]:
    """Mixtral, whose layers all have experts."""
    return {
        **_without(llama(model), "mlp_bias", "attention_bias", "rope_scaling"),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": model.moe_ffn_hidden_size,
        "sliding_window": None,
        "num_local_experts": model.num_moe_experts,
        "num_experts_per_tok": model.moe_router_topk,
    }


def deepseek_v3(model: Model) -> dict[str, Any]:
    """DeepSeek-V3, whose first layers are dense."""
    return {
        **_without(llama(model), "mlp_bias", "head_dim"),
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_routed_experts": model.num_moe_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // (model.moe_ffn_hidden_size or 1),
        "n_group": model.moe_router_num_groups,
        "topk_group": model.moe_router_group_topk,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor,
        "norm_topk_prob": True,
        "first_k_dense_replace": model.moe_layers.index(True),
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "rope_scaling": _yarn(model) if model.rope_type is RopeType.yarn else None,
    }


def gpt2(model: Model) -> dict[str, Any]:
    """GPT-2 and GPT-3."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.layernorm_epsilon,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
    }


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> (their value, ours) of what a `config.json` says otherwise; what it leaves out is its class's default."""
    older = {**theirs, "rope_scaling": _renamed(theirs.get("rope_scaling"))}
    older.setdefault("rope_theta", (theirs.get("rope_parameters") or {}).get("rope_theta"))
    return {
        name: (older[name], value)
        for name, value in ours.items()
        if older.get(name) is not None and older[name] != value
    }


def _renamed(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """With the key that says which scaling it is by its present name; "default" is none."""
    if scaling is None:
        return None
    kind = scaling.get("rope_type", scaling.get("type"))
    return None if kind == "default" else {**_without(scaling, "type"), "rope_type": kind}


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _llama3_scaling(model: Model) -> dict[str, Any]:
    """Source: megatron-core 0.19.2, rotary_pos_embedding.py, _apply_scaling: all but the factor is fixed there."""
    return {
        "rope_type": "llama3",
        "factor": model.rope_scaling_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _yarn(model: Model) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": model.rotary_scaling_factor,
        "original_max_position_embeddings": model.original_max_position_embeddings,
        "beta_fast": model.beta_fast,
        "beta_slow": model.beta_slow,
        "mscale": model.mscale,
        "mscale_all_dim": model.mscale_all_dim,
    }
