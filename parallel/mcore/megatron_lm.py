"""Reading a checkpoint of Megatron-LM (`torch_dist`): where it lies, what its arguments say, which weights it has.

Its weights are those of megatron-core's model, by the names that ours have; beside them it holds optimizer and random
state, which are left alone, and a pickled `argparse.Namespace` with all that was typed, which is compared with the
model here. That namespace, and the enumerations in it, load for this one read alone (`safe_load` knows none of them).
"""

import io
import json
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwright.conf.schema_model import Model
from shardwright.parallel.mcore.tensor_files import TensorReader

_TRACKER = "latest_checkpointed_iteration.txt"
_NO_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\.")
_STACK = "decoder.layers."
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Padded to a multiple of their own."""

_ARGUMENTS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "kv_channels",
    "max_position_embeddings": "max_position_embeddings",
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "normalization": "normalization",
    "layernorm_epsilon": "norm_epsilon",
    "gated_linear_unit": "swiglu",
    "add_bias_linear": "add_bias_linear",
    "add_qkv_bias": "add_qkv_bias",
    "qk_layernorm": "qk_layernorm",
    "multi_latent_attention": "multi_latent_attention",
    "num_moe_experts": "num_experts",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_router_topk": "moe_router_topk",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
"""Field of `Model` -> Megatron-LM's argument of the same meaning."""


def find(source: Path) -> Path | None:
    """The folder of one checkpoint of Megatron-LM's: `source`, or the one that its tracker names; None if none."""
    folder = source
    if (source / _TRACKER).is_file():
        said = (source / _TRACKER).read_text().strip()
        folder = source / (f"iter_{int(said):07d}" if said.isdecimal() else said)
    try:
        backend = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if backend == "torch_dist" and (folder / ".metadata").is_file() else None


def arguments(folder: Path) -> dict[str, Any]:
    """What was typed at the run that wrote `folder`; empty where it does not say.

    Raises:
        pickle.UnpicklingError: it holds something that no checkpoint of Megatron-LM needs.
    """
    legacy = folder / COMMON_STATE_FNAME
    if legacy.is_file():
        content = io.BytesIO(legacy.read_bytes())
    else:
        key = ShardedObject("common_state", None, (1,), (0,)).unique_key
        content = io.BytesIO(TensorReader(folder).read_bytes(key))
    with torch.serialization.safe_globals(SAFE_GLOBALS):
        common = torch.load(content, weights_only=True, map_location="cpu")
    typed = (common[0] if isinstance(common, list) else common).get("args")
    return vars(typed) if isinstance(typed, Namespace) else {}


def differences(typed: dict[str, Any], model: Model) -> dict[str, tuple[Any, Any]]:
    """Argument -> (its value, the model's) of what was otherwise."""
    ours = {theirs: _plain(getattr(model, field)) for field, theirs in _ARGUMENTS.items()}
    ours["untie_embeddings_and_output_weights"] = not model.share_embeddings_and_output_weights
    if typed.get("group_query_attention"):
        ours["num_query_groups"] = model.num_query_groups
    if not typed.get("num_experts"):  # defaults that say nothing of a dense model
        ours = {name: value for name, value in ours.items() if not name.startswith("moe_")}
    return {
        name: (_plain(typed[name]), value)
        for name, value in ours.items()
        if name in typed and (_plain(typed[name]) or None) != (value or None)
    }


def weights(folder: Path, model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by its own name, one after another; the vocabulary's rows are those of `model`, unpadded.

    Raises:
        KeyError: the vocabulary is smaller than the model's.
    """
    reader = TensorReader(folder)
    for key, stored in sorted(reader.entries().items()):
        if not isinstance(stored, TensorStorageMetadata) or _NO_WEIGHTS.match(key):
            continue
        stacked = key.startswith(_STACK) and not key.removeprefix(_STACK).split(".")[0].isdecimal()
        names = [key]
        if stacked:
            names = [f"{_STACK}{layer}.{key.removeprefix(_STACK)}" for layer in range(stored.size[0])]
        for name in names:
            tensor = reader.read(name)
            if name in VOCABULARY:
                if len(tensor) < model.vocab_size:
                    raise KeyError(f"{name} has {len(tensor)} rows, fewer than model.vocab_size={model.vocab_size}")
                tensor = tensor[: model.vocab_size]
            yield name, tensor


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
