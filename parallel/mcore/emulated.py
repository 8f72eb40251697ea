"""FP8 and FP4 without hardware for it: megatron-core's local layers with emulated products.

`precision.backend=emulated` builds the transformer's linear layers from the classes here; embedding and output layer
stay as they are, as they do with Transformer Engine. Communication is megatron-core's own mappings, so a layer
quantises what Transformer Engine would: its gathered input, its part of the weight. `attach` gives every layer its
recipe; a layer that stays in BF16 computes megatron-core's own product.
"""

import re
from collections.abc import Iterable
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
from shardwright.conf.schema import Config, Precision
from shardwright.parallel.fp8.delayed import DelayedScaling, Regions
from shardwright.parallel.fp8.formats import E4M3, E5M2, Format
from shardwright.parallel.fp8.linear import BlockScaling, CurrentScaling, Mxfp8, Nvfp4, Recipe, linear
from shardwright.parallel.linears import InBf16
from shardwright.parallel.mcore.names import in_whole_model


class _Emulated:
    """What both kinds of linear layers do in place of megatron-core's product."""

    recipe: Recipe
    in_bf16: bool
    """Whether the layer computes in BF16 now."""
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
        **others: Any,
    ) -> torch.Tensor:
        if self.in_bf16:
            communication = {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel}
            plain = super()._forward_impl  # type: ignore[misc]
            own: torch.Tensor = plain(input, weight, bias=bias, tp_group=tp_group, **communication, **others)
            return own
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


def emulated_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The linear layers of a model that are emulated, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _Emulated)}


def is_emulated(precision: Precision) -> bool:
    """Whether a narrow format is computed by plain torch operations."""
    narrow = precision.fp8 is not None or precision.fp4 is not None
    return narrow and precision.backend is PrecisionBackend.emulated


def attach(gpt: GPTModel, config: Config, groups: ProcessGroupCollection, device: torch.device) -> None:
    """Give every emulated layer of a model its recipe, and end the regions of delayed scaling where its layers end.

    Every rank calls it, before the model is wrapped for data parallelism. Scales are shared over
    `precision.amax_group`.
    """
    precision = config.precision
    layers = {in_whole_model(gpt, name): module for name, module in emulated_layers(gpt).items()}
    in_bf16 = InBf16.of(config)
    for name, layer in layers.items():
        layer.recipe = recipe_of(precision, device)
        layer.in_bf16 = name in in_bf16
    delayed = {name: layer.recipe for name, layer in layers.items() if isinstance(layer.recipe, DelayedScaling)}
    if delayed:
        largest = precision.fp8_amax_compute_algo is AmaxComputeAlgo.max
        group = getattr(groups, precision.amax_group.name)
        slots = _of_all_experts(delayed, config.model.num_moe_experts or 0)
        gpt.amax_regions = regions = Regions(delayed, group, precision.fp8_margin, largest, slots)
        gpt.decoder.register_forward_pre_hook(partial(_watch_backward, regions), with_kwargs=True)
        gpt.register_forward_hook(partial(_end_forward, regions))


def _of_all_experts(own: Iterable[str], num_experts: int) -> list[str]:
    """Names of the layers of this chunk with the experts of all ranks, in an order that is the same on all of them."""
    found = []
    for name in own:
        expert = re.search(r"(?<=\.local_experts\.)\d+", name)
        if expert is None:
            found.append(name)
        else:
            found += [name[: expert.start()] + str(number) + name[expert.end() :] for number in range(num_experts)]
    return sorted(dict.fromkeys(found))


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


def recipe_of(precision: Precision, device: torch.device) -> Recipe:
    """The arithmetic of a configuration's narrow format, without any state yet."""
    if precision.fp4 is not None:
        return Nvfp4(hadamard=precision.fp4_random_hadamard_transform, by_chance=precision.fp4_stochastic_rounding)
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
