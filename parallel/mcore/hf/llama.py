"""Llama (2 and 3; `LlamaForCausalLM` of transformers)."""

from shardwright.parallel.mcore.hf.mapping import COPY, GATE_UP, QKV, VOCABULARY, Row

_OURS, _THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."

LLAMA = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY),
    Row(f"{_OURS}self_attention.linear_qkv.layer_norm_weight", (f"{_THEIRS}input_layernorm.weight",), COPY),
    Row(
        f"{_OURS}self_attention.linear_qkv.weight",
        tuple(f"{_THEIRS}self_attn.{name}_proj.weight" for name in "qkv"),
        QKV,
    ),
    Row(f"{_OURS}self_attention.linear_proj.weight", (f"{_THEIRS}self_attn.o_proj.weight",), COPY),
    Row(f"{_OURS}mlp.linear_fc1.layer_norm_weight", (f"{_THEIRS}post_attention_layernorm.weight",), COPY),
    Row(
        f"{_OURS}mlp.linear_fc1.weight",
        (f"{_THEIRS}mlp.gate_proj.weight", f"{_THEIRS}mlp.up_proj.weight"),
        GATE_UP,
    ),
    Row(f"{_OURS}mlp.linear_fc2.weight", (f"{_THEIRS}mlp.down_proj.weight",), COPY),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), COPY),
    Row("output_layer.weight", ("lm_head.weight",), VOCABULARY),
)
