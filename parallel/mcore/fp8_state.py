"""FP8 state of Transformer Engine's layers in checkpoints, without pickle.

With delayed scaling every layer carries scales and amax histories, which Transformer Engine saves as a pickle inside a
byte tensor ("extra state") and, since unpickling can run anything, refuses to load unless an environment variable says
that the file is trusted. Here the same state is written as safetensors bytes: tensors, and a JSON header of plain
values. On loading, header and tensors are checked and handed to Transformer Engine's own setter in this process's own
pickle; nothing of a file is ever unpickled.
"""

import functools
import json
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

TENSORS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
RECIPE_FIELDS = ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax", "fp8_dpa", "fp8_mha")
_HEADER = "header"


def pack(state: dict[str, Any]) -> torch.Tensor:
    """Bytes [n] uint8 of a layer's FP8 state: `TENSORS`, the recipe's plain fields, and plain extra variables."""
    recipe = state["recipe"]
    header = {
        "recipe": {name: getattr(recipe, name) for name in RECIPE_FIELDS} | {"fp8_format": recipe.fp8_format.name},
        "extra": state["extra_fp8_variables"],
    }
    tensors = {name: state[name].contiguous() for name in TENSORS if name in state}
    tensors[_HEADER] = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save_safetensors(tensors)), dtype=torch.uint8)


def unpack(packed: torch.Tensor, make_recipe: Callable[..., Any], formats: Any) -> dict[str, Any]:
    """The state that `pack` wrote.

    Args:
        packed: bytes [n] uint8.
        make_recipe: builds the recipe from keyword arguments (`DelayedScaling`).
        formats: enum of FP8 formats by name (`Format`).

    Raises:
        ValueError: the bytes are something else.
    """
    try:
        tensors = load_safetensors(packed.cpu().numpy().tobytes())
        header = json.loads(tensors.pop(_HEADER).numpy().tobytes())
        fields = dict(header["recipe"])
        fields["fp8_format"] = formats[fields["fp8_format"]]
        unknown = (tensors.keys() - set(TENSORS)) | (fields.keys() - {*RECIPE_FIELDS, "fp8_format"})
    except Exception as error:
        raise ValueError(f"the FP8 state of a layer cannot be read: {error}") from error
    if unknown:
        raise ValueError(f"the FP8 state of a layer holds what does not belong there: {sorted(unknown)}")
    return {"recipe": make_recipe(**fields), "extra_fp8_variables": header["extra"], **tensors}


def install() -> None:
    """Make every Transformer Engine layer of this process save and load its FP8 state this way; idempotent."""
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule as Module

    if getattr(Module, "_fp8_state_without_pickle", False):
        return
    get_pickled, set_pickled = Module.get_extra_state, Module.set_extra_state

    @functools.wraps(get_pickled)
    def get_extra_state(self: Any) -> torch.Tensor:
        pickled: torch.Tensor = get_pickled(self)
        if pickled.numel() == 0:
            return pickled
        return pack(pickle.loads(pickled.numpy().tobytes()))  # bytes that this process has just written

    @functools.wraps(set_pickled)
    def set_extra_state(self: Any, packed: torch.Tensor | None) -> None:
        if packed is None or packed.numel() == 0:
            return
        state = pickle.dumps(unpack(packed, DelayedScaling, Format))
        before = os.environ.get("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE")
        os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"  # it is our own pickle, of checked values
        try:
            set_pickled(self, torch.frombuffer(bytearray(state), dtype=torch.uint8))
        finally:
            if before is None:
                del os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"]
            else:
                os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = before

    Module.get_extra_state, Module.set_extra_state = get_extra_state, set_extra_state
    Module._fp8_state_without_pickle = True
