"""Between megatron-core's weights and Hugging Face's: one table of rows per model family, one converter for all.

A row names one megatron-core tensor, the Hugging Face tensors that it is made of, and how. Names are those of
megatron-core's checkpoints, which are the same with and without Transformer Engine; `{layer}` counts from 0 over the
whole model. Everything here works on full tensors; `load_into` gives each rank its part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel

from shardwright.conf.schema import Model

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one megatron-core tensor is made of Hugging Face's, and taken apart again."""

    join: Callable[[list[torch.Tensor], Model], torch.Tensor]
    split: Callable[[torch.Tensor, Model], list[torch.Tensor]]
    parts: int = 1
    """Equal parts along the first dimension that tensor parallelism splits each on its own (SwiGLU's gate and up)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One megatron-core tensor and its origin."""

    megatron: str
    hugging_face: tuple[str, ...]
    kind: Kind


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


COPY = Kind(join=lambda tensors, _: tensors[0], split=lambda tensor, _: [tensor])
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
            names = tuple(name.format(layer=layer) for name in row.hugging_face)
            rows.append(Row(row.megatron.format(layer=layer), names, row.kind))
    return rows


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


def checkpoint_name(gpt: GPTModel, name: str) -> str:
    """Name in checkpoints of this rank's parameter `name`: layers counted over all stages, norms as TE fuses them."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(gpt.decoder.layers[int(parts[2])].layer_number - 1)
        name = ".".join(parts)
    return name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_").replace(
        ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
    )


@torch.no_grad()
def load_into(gpt: GPTModel, full: Mapping[str, torch.Tensor], family: tuple[Row, ...], model: Model) -> None:
    """Copy this rank's part of full megatron-core tensors into its model; every rank calls it.

    Raises:
        KeyError: the model has a parameter that `full` lacks.
    """
    parts = {row.megatron: row.kind.parts for row in rows_of(family, model)}
    tp_group = gpt.pg_collection.tp
    for local_name, parameter in gpt.named_parameters():
        # the last stage of a tied model holds the embedding once more
        name = checkpoint_name(gpt, local_name)
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        tensor = full[name]
        if getattr(parameter, "tensor_model_parallel", False):
            rank, size, dim = tp_group.rank(), tp_group.size(), parameter.partition_dim
            shards = [part.chunk(size, dim)[rank] for part in tensor.chunk(parts.get(name, 1), 0)]
            tensor = torch.cat(shards)
        parameter.copy_(tensor)
