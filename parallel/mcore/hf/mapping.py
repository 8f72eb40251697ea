"""Between megatron-core's weights and Hugging Face's: one table of rows per model family, one converter for all.

A row names one megatron-core tensor, the Hugging Face tensors that it is made of, and how. Names are those of
megatron-core's checkpoints, which are the same with and without Transformer Engine; `{layer}` counts from 0 over the
whole model. A checkpoint has one tensor for all experts of a layer, the expert being its first dimension; in names of
Hugging Face's `{expert}` stands for each of them. Everything here works on full tensors; `load_into` gives each rank
its part.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from megatron.core.models.gpt import GPTModel

from shardwright.conf.schema_model import Model

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one megatron-core tensor is made of Hugging Face's, and taken apart again."""

    join: Callable[[list[torch.Tensor], Model], torch.Tensor]
    split: Callable[[torch.Tensor, Model], list[torch.Tensor]]
    parts: int = 1
    """Equal parts along the first dimension that tensor parallelism splits each on its own (SwiGLU's gate and up)."""


class In(Enum):
    """Which layers have a tensor."""

    all = "all"
    dense = "dense"
    """Those without experts."""
    experts = "experts"


@dataclass(frozen=True, slots=True)
class Row:
    """One megatron-core tensor and its origin."""

    megatron: str
    hugging_face: tuple[str, ...]
    kind: Kind
    layers: In = In.all


def _join_qkv(tensors: list[torch.Tensor], model: Model) -> torch.Tensor:
    """q, k, v → rows grouped by query group: its query heads, its key head, its value head (attention.py)."""
    groups, channels = model.num_query_groups, model.kv_channels
    per_group = [tensor.view(groups, -1, channels, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(per_group, dim=1).reshape(-1, *tensors[0].shape[1:])


def _split_qkv(tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
    heads = model.num_attention_heads // model.num_query_groups
    grouped = tensor.view(model.num_query_groups, heads + 2, model.kv_channels, *tensor.shape[1:])
    return [part.reshape(-1, *tensor.shape[1:]) for part in grouped.split([heads, 1, 1], dim=1)]


def _join_vocabulary(tensors: list[torch.Tensor], model: Model) -> torch.Tensor:
    multiple = model.make_vocab_size_divisible_by
    missing = -tensors[0].shape[0] % multiple
    return torch.cat([tensors[0], tensors[0].new_zeros(missing, tensors[0].shape[1])])


def _join_experts(tensors: list[torch.Tensor], model: Model) -> torch.Tensor:
    """One tensor, or gate and up, of expert 0, of expert 1, … → [expert, rows, columns]."""
    return torch.cat(tensors).view(model.num_moe_experts or 0, -1, tensors[0].shape[1])


def _split_gated_experts(tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
    return [half for expert in tensor for half in expert.chunk(2)]


COPY = Kind(join=lambda tensors, _: tensors[0], split=lambda tensor, _: [tensor])
EXPERTS = Kind(join=_join_experts, split=lambda tensor, _: list(tensor))
GATED_EXPERTS = Kind(join=_join_experts, split=_split_gated_experts, parts=2)
QKV = Kind(join=_join_qkv, split=_split_qkv)
GATE_UP = Kind(join=lambda tensors, _: torch.cat(tensors), split=lambda tensor, _: list(tensor.chunk(2)), parts=2)
VOCABULARY = Kind(join=_join_vocabulary, split=lambda tensor, model: [tensor[: model.vocab_size]])


def rows_of(family: tuple[Row, ...], model: Model) -> list[Row]:
    """The family's rows for every layer of `model`; a tied output layer has no row of its own."""
    rows = []
    for row in family:
        if row.megatron == "output_layer.weight" and model.share_embeddings_and_output_weights:
            continue
        for layer in range(model.num_layers if "{layer}" in row.megatron else 1):
            if row.layers is In.all or (row.layers is In.experts) == model.moe_layers[layer]:
                rows.append(Row(row.megatron.format(layer=layer), tuple(_names(row, layer, model)), row.kind))
    return rows


def _names(row: Row, layer: int, model: Model) -> Iterator[str]:
    """Hugging Face's names of a row: of expert 0, of expert 1, …"""
    per_expert = "{expert}" in row.hugging_face[0]
    for expert in range(model.num_moe_experts or 0) if per_expert else (0,):
        for name in row.hugging_face:
            yield name.format(layer=layer, expert=expert)


def to_megatron(state: Mapping[str, torch.Tensor], family: tuple[Row, ...], model: Model) -> State:
    """Full megatron-core tensors from a Hugging Face state dict.

    Raises:
        KeyError: a tensor that the family's table names is missing.
    """
    return {
        row.megatron: row.kind.join([state[name] for name in row.hugging_face], model) for row in rows_of(family, model)
    }


def to_hugging_face(state: Mapping[str, torch.Tensor], family: tuple[Row, ...], model: Model) -> State:
    """A Hugging Face state dict from full megatron-core tensors; the inverse of `to_megatron`."""
    result: State = {}
    for row in rows_of(family, model):
        result.update(zip(row.hugging_face, row.kind.split(state[row.megatron], model), strict=True))
    return result


def checkpoint_name(gpt: GPTModel, name: str) -> tuple[str, int | None]:
    """Name in checkpoints of this rank's parameter `name`, and which of all experts it belongs to (None: to none).

    Layers are counted over all stages, and norms are named as Transformer Engine fuses them.
    """
    expert = None
    found = re.fullmatch(r"(decoder\.layers\.)(\d+)\.(.*)", name)
    if found is None:
        return name, None
    layer, inside = gpt.decoder.layers[int(found[2])], found[3]
    for local, saved in layer.submodules_config.sharded_state_dict_keys_map.items():
        inside = inside.replace(local, saved) if inside.startswith(local) else inside
    # experts one by one, or grouped in Transformer Engine's layers
    for pattern in (r"mlp\.experts\.local_experts\.(\d+)\.(.*)", r"mlp\.experts\.(linear_fc\d\.weight)(\d+)"):
        if of_expert := re.fullmatch(pattern, inside):
            number, rest = sorted(of_expert.groups(), key=str.isdecimal, reverse=True)
            group = gpt.pg_collection.ep
            expert = group.rank() * ((layer.mlp.config.num_moe_experts or 0) // group.size()) + int(number)
            inside = f"mlp.experts.experts.{rest}"
    return f"{found[1]}{layer.layer_number - 1}.{inside}", expert


@torch.no_grad()
def load_into(gpt: GPTModel, full: Mapping[str, torch.Tensor], family: tuple[Row, ...], model: Model) -> None:
    """Copy this rank's part of full megatron-core tensors into its model; every rank calls it.

    Raises:
        KeyError: the model has a parameter that `full` lacks.
    """
    parts = {row.megatron: row.kind.parts for row in rows_of(family, model)}
    biases = [(name, buffer) for name, buffer in gpt.named_buffers() if name.endswith(".expert_bias")]
    for local_name, parameter in [*gpt.named_parameters(), *biases]:
        # the last stage of a tied model holds the embedding once more
        name, expert = checkpoint_name(gpt, local_name)
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        tensor = full[name] if expert is None else full[name][expert]
        if getattr(parameter, "tensor_model_parallel", False):
            group = gpt.pg_collection.tp if expert is None else gpt.pg_collection.expt_tp
            rank, size, dim = group.rank(), group.size(), parameter.partition_dim
            shards = [part.chunk(size, dim)[rank] for part in tensor.chunk(parts.get(name, 1), 0)]
            tensor = torch.cat(shards)
        parameter.copy_(tensor)
