"""FP8 and FP4 without hardware for it: megatron-core's local layers with emulated products.

`precision.backend=emulated` builds the transformer's linear layers from the classes here; embedding and output layer
stay as they are, as they do with Transformer Engine. Communication is megatron-core's own mappings, so a layer
quantises what Transformer Engine would: its gathered input, its part of the weight. `attach` gives every layer its
recipe.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from shardwright.conf.choices import AmaxComputeAlgo, Fp8Format, Fp8Recipe, PrecisionBackend
from shardwright.conf.schema import Precision
from shardwright.parallel.fp8.delayed import DelayedScaling, Regions
from shardwright.parallel.fp8.formats import E4M3, E5M2, Format
from shardwright.parallel.fp8.linear import BlockScaling, CurrentScaling, Mxfp8, Nvfp4, Recipe, linear


class _Emulated:
    """What both kinds of linear layers do in place of megatron-core's product."""

    recipe: Recipe
    training: bool

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = linear(input, weight, self.recipe, training=self.training)
        return output if bias is None else output + bias

    def get_extra_state(self) -> torch.Tensor | None:
        """Histories and scales as safetensors bytes; None without such state."""
        if not isinstance(self.recipe, DelayedScaling):
            return None
        tensors: dict[str, torch.Tensor] = {}
        for operand, history in self.recipe.histories.items():
            tensors |= {f"{operand}.amaxes": history.amaxes, f"{operand}.scale": history.scale}
        return torch.frombuffer(bytearray(save_safetensors(tensors)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """What `get_extra_state` gave; histories of another length keep their newest amaxes."""
        if state is None or state.numel() == 0 or not isinstance(self.recipe, DelayedScaling):
            return
        tensors = load_safetensors(state.cpu().numpy().tobytes())
        for operand, history in self.recipe.histories.items():
            saved = tensors[f"{operand}.amaxes"].to(history.amaxes.device)
            kept = min(len(saved), len(history.amaxes))
            history.amaxes = torch.cat([torch.zeros_like(history.amaxes)[kept:], saved[len(saved) - kept :]])
            history.scale = tensors[f"{operand}.scale"].to(history.scale.device)


class EmulatedColumnParallelLinear(_Emulated, ColumnParallelLinear):  # type: ignore[misc]
    """Output features split over TP ranks."""


class EmulatedRowParallelLinear(_Emulated, RowParallelLinear):  # type: ignore[misc]
    """Input features split over TP ranks."""


def is_emulated(precision: Precision) -> bool:
    """Whether a narrow format is computed by plain torch operations."""
    narrow = precision.fp8 is not None or precision.fp4 is not None
    return narrow and precision.backend is PrecisionBackend.emulated


def attach(gpt: GPTModel, precision: Precision, groups: ProcessGroupCollection, device: torch.device) -> None:
    """Give every emulated layer of a model its recipe, and end the regions of delayed scaling where its layers end.

    Every rank calls it, before the model is wrapped for data parallelism. Scales are shared over TP x DP x CP, as
    megatron-core shares Transformer Engine's.
    """
    layers = {name: module for name, module in gpt.named_modules() if isinstance(module, _Emulated)}
    for layer in layers.values():
        layer.recipe = _recipe(precision, layer, groups, device)
    delayed = {name: layer.recipe for name, layer in layers.items() if isinstance(layer.recipe, DelayedScaling)}
    if delayed:
        largest = precision.fp8_amax_compute_algo is AmaxComputeAlgo.max
        regions = Regions(delayed, groups.tp_dp_cp, precision.fp8_margin, largest)
        gpt.decoder.register_forward_pre_hook(partial(_watch_backward, regions), with_kwargs=True)
        gpt.register_forward_hook(partial(_end_forward, regions))


def _watch_backward(regions: Regions, block: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """The backward pass of a micro-batch is over when the gradient of what entered the first layer is there."""
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if hidden is None:  # a later pipeline stage: what came over the pipeline
        hidden = block.input_tensor
    if block.training and hidden is not None and hidden.requires_grad:
        hidden.register_hook(lambda gradient: regions.end_backward())


def _end_forward(regions: Regions, gpt: torch.nn.Module, args: Any, output: Any) -> None:
    if gpt.training:
        regions.end_forward()


def _recipe(precision: Precision, layer: Any, groups: ProcessGroupCollection, device: torch.device) -> Recipe:
    if precision.fp4 is not None:
        return Nvfp4()
    assert precision.fp8 is not None, "a layer is emulated without a narrow format"
    backward: Format = E5M2 if precision.fp8 is Fp8Format.hybrid else E4M3
    match precision.fp8_recipe:
        case Fp8Recipe.delayed:
            return DelayedScaling(precision.fp8_amax_history_len, E4M3, backward, device)
        case Fp8Recipe.blockwise:
            return BlockScaling(E4M3, backward)
        case Fp8Recipe.mxfp8:
            return Mxfp8(E4M3, backward)
    return CurrentScaling(E4M3, backward)
