"""DeepSeek-V3 (`DeepseekV3ForCausalLM` of transformers), which has no layers of multi-token prediction."""

from shardwright.parallel.mcore.hf.mapping import COPY, GATE_UP, In, Row
from shardwright.parallel.mcore.hf.rows import ENDS, MLP, OURS, THEIRS, experts

_ATTENTION = tuple(
    Row(f"{OURS}{ours}", (f"{THEIRS}{theirs}",), COPY)
    for ours, theirs in {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
        "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
        "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    }.items()
)
_SHARED = f"{THEIRS}mlp.shared_experts."

DEEPSEEK_V3 = (
    *ENDS,
    *_ATTENTION,
    *MLP,
    *experts("mlp", "gate_proj", "up_proj", "down_proj"),
    Row(f"{OURS}mlp.router.expert_bias", (f"{THEIRS}mlp.gate.e_score_correction_bias",), COPY, In.experts),
    Row(
        f"{OURS}mlp.shared_experts.linear_fc1.weight",
        (f"{_SHARED}gate_proj.weight", f"{_SHARED}up_proj.weight"),
        GATE_UP,
        In.experts,
    ),
    Row(f"{OURS}mlp.shared_experts.linear_fc2.weight", (f"{_SHARED}down_proj.weight",), COPY, In.experts),
)
