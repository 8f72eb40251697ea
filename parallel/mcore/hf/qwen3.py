"""Qwen3, dense and with experts (`Qwen3ForCausalLM` and `Qwen3MoeForCausalLM` of transformers)."""

from shardwright.parallel.mcore.hf.rows import ATTENTION, ENDS, MLP, QK_NORMS, experts

QWEN3 = (*ENDS, *ATTENTION, *QK_NORMS, *MLP)
QWEN3_MOE = (*QWEN3, *experts("mlp", "gate_proj", "up_proj", "down_proj"))
