"""Mixtral (`MixtralForCausalLM` of transformers)."""

from shardwright.parallel.mcore.hf.rows import ATTENTION, ENDS, experts

MIXTRAL = (*ENDS, *ATTENTION, *experts("block_sparse_moe", "w1", "w3", "w2"))
