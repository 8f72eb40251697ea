"""The linear layers of the transformer blocks by name, and which of them stay in BF16: no torch.

Narrow formats are for these layers alone: embedding, norms, router, attention's products and the output layer compute
in `precision.dtype` with every recipe. A layer is named as megatron-core names its module, with the number that the
block and the expert have in the whole model, so that a glob means the same in every layout.

What stays in BF16 is decided here and nowhere else, for the emulation and for Transformer Engine, with every recipe.
megatron-core's own switch (`first_last_layers_bf16`) refuses delayed scaling, because it enters and leaves the FP8
region once per block; here a region stays whole, and single layers step out of it.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from shardwright.conf.choices import PrecisionBackend
from shardwright.conf.schema import Config
from shardwright.conf.schema_model import Model


def names(config: Config) -> list[str]:
    """Every linear layer of the model, in order; experts that Transformer Engine computes at once are one layer."""
    model = config.model
    grouped = model.moe_grouped_gemm and config.precision.backend is PrecisionBackend.transformer_engine
    found = [
        f"decoder.layers.{number}.{part}"
        for number, has_experts in enumerate(model.moe_layers)
        for part in _of_block(model, has_experts=has_experts, grouped=grouped)
    ]
    last_has_experts = bool(model.moe_layers) and model.moe_layers[-1]  # these blocks are made as the last one
    for number in range(model.mtp_num_layers or 0):
        found.append(f"mtp.layers.{number}.eh_proj")
        parts = _of_block(model, has_experts=last_has_experts, grouped=grouped)
        found += [f"mtp.layers.{number}.mtp_model_layer.{part}" for part in parts]
    return found


def _of_block(model: Model, *, has_experts: bool, grouped: bool) -> Iterator[str]:
    """The linear layers of one block."""
    attention = ["linear_qkv"]
    if model.multi_latent_attention:
        queries = ["linear_q_proj"] if model.q_lora_rank is None else ["linear_q_down_proj", "linear_q_up_proj"]
        attention = [*queries, "linear_kv_down_proj", "linear_kv_up_proj"]
    yield from (f"self_attention.{name}" for name in (*attention, "linear_proj"))
    mlps = ["mlp"]
    if has_experts:
        experts = range(model.num_moe_experts or 0)
        mlps = ["mlp.experts"] if grouped else [f"mlp.experts.local_experts.{expert}" for expert in experts]
        if model.moe_shared_expert_intermediate_size:
            mlps.append("mlp.shared_experts")
    yield from (f"{mlp}.{name}" for mlp in mlps for name in ("linear_fc1", "linear_fc2"))


@dataclass(frozen=True, slots=True)
class InBf16:
    """Which layers stay in BF16 in spite of the recipe."""

    globs: tuple[str, ...]
    """Case-sensitive, over names."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """What a configuration asks for: its globs, and the blocks at both ends."""
        precision, last = config.precision, config.model.num_layers
        blocks = range(last)
        at_ends = {
            *blocks[: precision.num_layers_at_start_in_bf16],
            *_last(blocks, precision.num_layers_at_end_in_bf16),
        }
        return cls((*precision.bf16_layers, *(f"decoder.layers.{number}.*" for number in sorted(at_ends))))

    def __contains__(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in self.globs)

    def among(self, all_names: Iterable[str]) -> list[str]:
        """Those of the names that stay in BF16."""
        return [name for name in all_names if name in self]


def _last(blocks: range, number: int) -> range:
    return blocks[len(blocks) - number :] if number < len(blocks) else blocks


def near(glob: str, all_names: Sequence[str], count: int = 3) -> list[str]:
    """Names that somebody may have meant by a glob that matches none; the first ones where none is close."""
    return difflib.get_close_matches(glob, all_names, n=count, cutoff=0.4) or list(all_names[:count])
