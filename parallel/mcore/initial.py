"""Initial weights: they follow from the run's seed and each tensor's name in a checkpoint, in every layout the same.

megatron-core draws from a rank's random state, so the weights depend on which layers and which part of each a rank has.
Here a model is built without drawing. Then every matrix is filled as if it were loaded from a checkpoint whose tensors
were drawn one by one: `sharded_state_dict` says which part of which tensor of the whole model a rank's piece is. A
tensor is drawn in blocks of rows, each with a seed of its own, so that a rank draws what its rows need and no more, and
never holds a whole tensor. Vectors stay as their modules make them: norms one, biases zero.

Numbers of a CPU and of a GPU differ, since torch's generators do.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.models.gpt import GPTModel

from shardwright.conf.schema_model import Model
from shardwright.parallel.mcore import fp8_params

BLOCK = 1 << 22
"""Elements of one block, or one row if that is more. Another number makes other weights."""
OUTPUT = (".linear_proj.weight", ".linear_fc2.weight")
"""Ends of names of the matrices that write into the residual stream; they begin smaller, by the number of layers.

Source: megatron-core 0.19.2, `scaled_init_method_normal` (utils.py), from Radford et al. 2019, section 2.3."""


def leave(weight: torch.Tensor) -> None:
    """What megatron-core is given as its initialisation: the weights are drawn later."""


@torch.no_grad()
def draw_weights(gpt: GPTModel, model: Model, seed: int) -> None:
    """Fill every matrix of this rank's part of the model; no communication.

    Args:
        gpt: newly built, on its device, not yet wrapped.
        model: its section of the configuration, for the standard deviation.
        seed: of the run.
    """
    state = gpt.sharded_state_dict()
    in_fp8 = fp8_params.to_bf16(state)
    quantized = {id(weight): plain for weight, plain in in_fp8}
    weights = [quantized.get(id(weight), weight) for weight in gpt.parameters()]
    matrices = {weight.untyped_storage().data_ptr(): weight for weight in weights if weight.dim() > 1}
    drawn = dict.fromkeys(matrices, 0)
    for piece in _pieces(state):
        storage = piece.data.untyped_storage().data_ptr()
        if storage in matrices:
            std = model.init_method_std
            if piece.key.endswith(OUTPUT):
                std /= math.sqrt(2 * model.num_layers)
            _fill(piece, std, seed)
            drawn[storage] += piece.data.numel()
    missed = [storage for storage, weight in matrices.items() if drawn[storage] != weight.numel()]
    assert not missed, f"{len(missed)} matrices of the model are not whole in its checkpoint"
    fp8_params.quantize(in_fp8)


def _pieces(state: Any) -> Iterator[ShardedTensor]:
    """The pieces of tensors in a sharded state, also those that are made of one parameter (gate and up)."""
    if isinstance(state, ShardedTensorFactory):
        state = state.build()
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, dict | list):
        for inner in state.values() if isinstance(state, dict) else state:
            yield from _pieces(inner)


def _fill(piece: ShardedTensor, std: float, seed: int) -> None:
    """Draw a rank's piece of a matrix; leading axes of the whole tensor count layers or experts."""
    data, leading = piece.data, piece.prepend_axis_num
    which, (first_row, first_column) = piece.global_offset[:leading], piece.global_offset[leading:]
    num_rows, num_columns = piece.global_shape[leading:]
    step = max(1, BLOCK // num_columns)
    columns = slice(first_column, first_column + data.size(1))
    generator = torch.Generator(data.device)
    for start in range(first_row // step * step, first_row + data.size(0), step):
        stop = min(start + step, num_rows)
        generator.manual_seed(seed_of(seed, piece.key, *which, start))
        block = torch.empty(stop - start, num_columns, device=data.device).normal_(0.0, std, generator=generator)
        low, high = max(start, first_row), min(stop, first_row + data.size(0))
        data[low - first_row : high - first_row].copy_(block[low - start : high - start, columns])


def seed_of(*parts: int | str) -> int:
    """A seed for torch that nothing but these parts decides."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1
