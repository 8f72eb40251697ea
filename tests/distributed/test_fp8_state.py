"""A layer's FP8 state in a checkpoint: plain bytes in, the same state out, and nothing else is accepted."""

import enum
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shardwright.parallel.mcore import fp8_state


class Format(enum.Enum):
    """As Transformer Engine's: formats by name."""

    E4M3 = 1
    HYBRID = 2


@dataclass
class Recipe:
    """The fields of Transformer Engine's DelayedScaling."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 16
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


def state() -> dict[str, Any]:
    return {
        "recipe": Recipe(margin=1),
        "scale_fwd": torch.tensor([56.0, 224.0, 1.0]),
        "amax_history_fwd": torch.rand(16, 3),
        "scale_bwd": torch.tensor([1.0, 2.0]),
        "amax_history_bwd": torch.rand(16, 2),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 1, "name": "fc1"},
    }


def test_state_comes_back_bit_for_bit() -> None:
    original = state()
    loaded = fp8_state.unpack(fp8_state.pack(original), Recipe, Format)
    assert loaded["recipe"] == original["recipe"]
    assert loaded["extra_fp8_variables"] == original["extra_fp8_variables"]
    for name in fp8_state.TENSORS:
        assert torch.equal(loaded[name], original[name])


def test_a_pickle_in_its_place_is_refused_and_does_not_run() -> None:
    planted = torch.frombuffer(bytearray(pickle.dumps(state())), dtype=torch.uint8)
    with pytest.raises(ValueError, match="cannot be read"):
        fp8_state.unpack(planted, Recipe, Format)


def test_a_tensor_that_does_not_belong_there_is_refused() -> None:

    packed = fp8_state.pack(state())
    from safetensors.torch import load, save

    tensors = load(packed.numpy().tobytes())
    tensors["weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match="does not belong"):
        fp8_state.unpack(torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8), Recipe, Format)
