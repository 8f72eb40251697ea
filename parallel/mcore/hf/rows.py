"""Rows that several families share: vocabulary, grouped-query attention, SwiGLU, experts, by `model.*` names."""

from shardwright.parallel.mcore.hf.mapping import (
    COPY,
    EXPERTS,
    GATE_UP,
    GATED_EXPERTS,
    QKV,
    VOCABULARY,
    In,
    Row,
)

OURS, THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."

ENDS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), COPY),
    Row("output_layer.weight", ("lm_head.weight",), VOCABULARY),
)

ATTENTION = (
    Row(f"{OURS}self_attention.linear_qkv.layer_norm_weight", (f"{THEIRS}input_layernorm.weight",), COPY),
    Row(
        f"{OURS}self_attention.linear_qkv.weight",
        tuple(f"{THEIRS}self_attn.{name}_proj.weight" for name in "qkv"),
        QKV,
    ),
    Row(f"{OURS}self_attention.linear_proj.weight", (f"{THEIRS}self_attn.o_proj.weight",), COPY),
)

QK_NORMS = tuple(
    Row(f"{OURS}self_attention.{name}_layernorm.weight", (f"{THEIRS}self_attn.{name}_norm.weight",), COPY)
    for name in "qk"
)

MLP = (
    Row(
        f"{OURS}mlp.linear_fc1.layer_norm_weight",
        (f"{THEIRS}post_attention_layernorm.weight",),
        COPY,
        In.dense,
    ),
    Row(
        f"{OURS}mlp.linear_fc1.weight",
        (f"{THEIRS}mlp.gate_proj.weight", f"{THEIRS}mlp.up_proj.weight"),
        GATE_UP,
        In.dense,
    ),
    Row(f"{OURS}mlp.linear_fc2.weight", (f"{THEIRS}mlp.down_proj.weight",), COPY, In.dense),
)


def experts(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Rows of router and routed experts.

    Args:
        block: Hugging Face's name of the MoE block in its layer.
        gate, up, down: its names of an expert's matrices.
    """
    router, expert = f"{THEIRS}{block}.gate.weight", f"{THEIRS}{block}.experts.{{expert}}."
    return (
        Row(f"{OURS}pre_mlp_layernorm.weight", (f"{THEIRS}post_attention_layernorm.weight",), COPY, In.experts),
        Row(f"{OURS}mlp.router.weight", (router,), COPY, In.experts),
        Row(
            f"{OURS}mlp.experts.experts.linear_fc1.weight",
            (f"{expert}{gate}.weight", f"{expert}{up}.weight"),
            GATED_EXPERTS,
            In.experts,
        ),
        Row(f"{OURS}mlp.experts.experts.linear_fc2.weight", (f"{expert}{down}.weight",), EXPERTS, In.experts),
    )
