"""Llama (2 and 3; `LlamaForCausalLM` of transformers)."""

from shardwright.parallel.mcore.hf.rows import ATTENTION, ENDS, MLP

LLAMA = (*ENDS, *ATTENTION, *MLP)
