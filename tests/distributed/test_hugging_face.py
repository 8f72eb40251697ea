"""An outside oracle: Hugging Face's classes with the same weights give the same logits, for every family."""

import pytest
import torch

from shardwright.parallel.mcore.hf import mapping
from shardwright.parallel.mcore.hf.families import family_of

from . import engines, hugging_face
from .harness import RunRanks
from .tail import long_tail

ABSOLUTE = 1e-4
"""fp32 logits of order 1 to 10 through few layers, summed in another order."""

UNTIED = "model.share_embeddings_and_output_weights=false"
PARALLEL = ["parallel.tp=2", "parallel.sp=true"]
NO_MTP = ["model.mtp_num_layers=null", "model.mtp_loss_scaling_factor=null"]
PADDED = "model.vocab_size=2000"
"""To 2048."""

VARIANTS = {
    "Llama, tied": ("Llama", 1, ["model=tiny"]),
    "Llama, untied": ("Llama", 1, ["model=tiny", UNTIED]),
    "Llama, tied, tensor parallel": ("Llama", 2, ["model=tiny", "parallel.tp=2"]),
    "Llama, untied, tensor and sequence parallel": ("Llama", 2, ["model=tiny", UNTIED, *PARALLEL]),
    "Llama 3.1's long sequences": (
        "Llama",
        1,
        ["model=tiny", "model.rope_scaling=true", "model.rope_scaling_factor=8", "model.rotary_base=500000"],
    ),
    "GPT-3": ("GPT2", 1, ["model=tiny_gpt"]),
    "GPT-3, tensor and sequence parallel": ("GPT2", 2, ["model=tiny_gpt", *PARALLEL]),
    "Qwen3": ("Qwen3", 1, ["model=tiny_qwen3"]),
    "Qwen3, tensor and sequence parallel": ("Qwen3", 2, ["model=tiny_qwen3", *PARALLEL]),
    "Qwen3 MoE": ("Qwen3Moe", 1, ["model=tiny_qwen3_moe"]),
    "Qwen3 MoE, tensor and sequence parallel": ("Qwen3Moe", 2, ["model=tiny_qwen3_moe", *PARALLEL]),
    "Mixtral": ("Mixtral", 1, ["model=tiny_mixtral"]),
    "Mixtral, tensor and sequence parallel": ("Mixtral", 2, ["model=tiny_mixtral", *PARALLEL]),
    "DeepSeek-V3": ("DeepseekV3", 1, ["model=tiny_deepseek", *NO_MTP]),
    "DeepSeek-V3, tensor and sequence parallel": ("DeepseekV3", 2, ["model=tiny_deepseek", *NO_MTP, *PARALLEL]),
}
QUICK = [name for name in VARIANTS if "parallel" not in name]
QUICK += ["Llama, tied, tensor parallel", "DeepSeek-V3, tensor and sequence parallel"]


def largest_difference(
    rank: int, world: int, store: str, family: str, overrides: list[str]
) -> tuple[float, float, list[str]]:
    """Largest difference of logits, largest logit, and the tensors that do not come back as they were."""
    engine = engines.engine_of(engines.family_config([PADDED, *overrides], world), rank, store)
    model, gpt = engine.config.model, engine.model.module
    theirs, table = hugging_face.randomised(model), family_of(model).rows
    assert type(theirs).__name__.startswith(family)
    full = mapping.to_megatron(theirs.state_dict(), table, model)
    mapping.load_into(gpt, full, table, model)
    tokens = engines.random_step(11, vocab_size=model.vocab_size)["tokens"]
    engine.model.disable_forward_pre_hook(param_sync=False)  # the weights were written by hand
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = gpt.eval()(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    width = found.shape[-1]
    columns = range(rank * width, min((rank + 1) * width, model.vocab_size)) if world > 1 else range(model.vocab_size)
    difference = found[..., : len(columns)] - expected[..., columns.start : columns.stop]
    back, given = mapping.to_hugging_face(full, table, model), theirs.state_dict()
    if model.share_embeddings_and_output_weights:
        given.pop("lm_head.weight")
    changed = [name for name in given.keys() | back.keys() if not _same(given.get(name), back.get(name))]
    return float(difference.abs().max()), float(expected.abs().max()), changed


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("name", long_tail(VARIANTS, quick=QUICK))
def test_logits_equal_hugging_faces(run_ranks: RunRanks, name: str) -> None:
    family, world, overrides = VARIANTS[name]
    for difference, largest, changed in run_ranks(largest_difference, world, family, overrides):
        assert difference < ABSOLUTE
        assert largest > 0.1, "the oracle's logits are too small to tell anything"
        assert changed == [], "every tensor of Hugging Face's comes back from ours"
