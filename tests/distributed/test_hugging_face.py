"""An outside oracle: Hugging Face's Llama with the same weights gives the same logits."""

import pytest
import torch

from shardwright.parallel.mcore.hf import mapping
from shardwright.parallel.mcore.hf.llama import LLAMA

from . import engines
from .harness import RunRanks

ABSOLUTE = 1e-4
"""fp32 logits of order 1 through two layers, summed in another order."""

VARIANTS = {
    "tied": (1, []),
    "untied": (1, ["model.share_embeddings_and_output_weights=false"]),
    "tied, tensor parallel": (2, ["parallel.tp=2"]),
    "untied, tensor and sequence parallel": (
        2,
        ["model.share_embeddings_and_output_weights=false", "parallel.tp=2", "parallel.sp=true"],
    ),
}


def hugging_face_llama(model):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_query_groups,
            head_dim=model.kv_channels,
            max_position_embeddings=model.max_position_embeddings,
            rms_norm_eps=model.layernorm_epsilon,
            rope_theta=float(model.rotary_base),
            tie_word_embeddings=model.share_embeddings_and_output_weights,
            initializer_range=0.1,
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        for parameter in llama.parameters():
            if parameter.dim() == 1:  # norms away from 1, so that a forgotten one is seen
                parameter.normal_(1.0, 0.3)
    return llama.eval()


def largest_difference(rank: int, world: int, store: str, overrides: list[str]) -> tuple[float, float]:
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    model, gpt = engine.config.model, engine.model.module
    llama = hugging_face_llama(model)
    full = mapping.to_megatron(llama.state_dict(), LLAMA, model)
    mapping.load_into(gpt, full, LLAMA, model)
    tokens = engines.random_step(11)["tokens"]
    engine.model.disable_forward_pre_hook(param_sync=False)  # the weights were written by hand
    with torch.no_grad():
        expected = llama(tokens).logits
        found = gpt.eval()(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    width = found.shape[-1]
    columns = range(rank * width, min((rank + 1) * width, model.vocab_size)) if world > 1 else range(model.vocab_size)
    difference = found[..., : len(columns)] - expected[..., columns.start : columns.stop]
    back = mapping.to_hugging_face(full, LLAMA, model)
    assert all(torch.equal(tensor, llama.state_dict()[name]) for name, tensor in back.items())
    return float(difference.abs().max()), float(expected.abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_hugging_faces(run_ranks: RunRanks, name: str) -> None:
    world, overrides = VARIANTS[name]
    for difference, largest in run_ranks(largest_difference, world, overrides):
        assert difference < ABSOLUTE
        assert largest > 0.1, "the oracle's logits are too small to tell anything"
