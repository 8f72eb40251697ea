"""Hugging Face's classes as an outside oracle: the same architecture from one of our `Model`s."""

from typing import Any

import torch

from shardwright.conf.schema_model import Model
from shardwright.parallel.mcore.hf.deepseek import DEEPSEEK_V3
from shardwright.parallel.mcore.hf.gpt import GPT
from shardwright.parallel.mcore.hf.llama import LLAMA
from shardwright.parallel.mcore.hf.mapping import Row
from shardwright.parallel.mcore.hf.mixtral import MIXTRAL
from shardwright.parallel.mcore.hf.qwen3 import QWEN3, QWEN3_MOE

FAMILIES: dict[str, tuple[str, tuple[Row, ...]]] = {
    "GPT2": ("GPT2LMHeadModel", GPT),
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Qwen3": ("Qwen3ForCausalLM", QWEN3),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", QWEN3_MOE),
    "Mixtral": ("MixtralForCausalLM", MIXTRAL),
    "DeepseekV3": ("DeepseekV3ForCausalLM", DEEPSEEK_V3),
}
"""Family -> its class and our table of its weights; `<family>Config` is its configuration."""


def build(family: str, values: dict[str, Any], device: str = "cpu") -> Any:
    """The class of a family, built from values of its `config.json`."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**values)
    with torch.device(device):
        return getattr(transformers, FAMILIES[family][0])._from_config(config, attn_implementation="eager")


def values_of(family: str, model: Model) -> dict[str, Any]:
    """What the family's `config.json` would say of `model`."""
    if family == "GPT2":
        return {
            "vocab_size": model.vocab_size,
            "n_positions": model.max_position_embeddings,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_hidden_size,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": model.layernorm_epsilon,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    values: dict[str, Any] = {
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
        "sliding_window": None,
        "num_experts_per_tok": model.moe_router_topk,
    }
    if model.rope_scaling:
        values["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if family == "Mixtral":
        values["num_local_experts"] = model.num_moe_experts
    if family == "Qwen3Moe":
        values |= {
            "num_experts": model.num_moe_experts,
            "moe_intermediate_size": model.moe_ffn_hidden_size,
            "norm_topk_prob": True,
        }
    if family == "DeepseekV3":
        del values["head_dim"]
        values |= {
            "n_routed_experts": model.num_moe_experts,
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
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": model.rotary_scaling_factor,
                "original_max_position_embeddings": model.original_max_position_embeddings,
                "beta_fast": model.beta_fast,
                "beta_slow": model.beta_slow,
                "mscale": model.mscale,
                "mscale_all_dim": model.mscale_all_dim,
            },
        }
    return values


def randomised(family: str, model: Model) -> Any:
    """The family's class for `model`, with weights far enough from zero and from one for a forgotten one to be seen."""
    torch.manual_seed(3)
    theirs = build(family, {**values_of(family, model), "initializer_range": 0.1})
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if name.endswith("bias"):  # of a linear layer, a norm, or an expert
                tensor.normal_(0.0, 0.1)
            elif tensor.dim() == 1:
                tensor.normal_(1.0, 0.3)
            elif name.endswith("mlp.gate.weight"):  # DeepSeek's router begins as zeros
                tensor.normal_(0.0, 0.1)
    return theirs.eval()
