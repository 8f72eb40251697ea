"""Samples of what the linear layers quantise: the operands of one micro-batch, caught by hooks and measured.

The same hooks for emulated layers and Transformer Engine's: a layer's input, its weight, and the gradient of its
output. They are caught on each rank as they pass the module's border, so under sequence parallelism a rank measures its
part of the tokens and the sums are put together. Transformer Engine's layers with a norm in front quantise the normed
input, which never passes a border: it is computed again here.

A recomputed layer runs twice; its operands are measured the first time, its gradient where it has one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwright.conf.schema import Precision
from shardwright.parallel.fp8.linear import Recipe
from shardwright.parallel.fp8.statistics import Numbers, measure
from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore.emulated import recipe_of
from shardwright.parallel.mcore.narrow import NarrowLinears

type Measured = dict[tuple[str, str], tuple[Numbers, float | None, bool]]
"""Layer and operand -> its numbers, the scale of delayed scaling, whether the layer computed in BF16."""


class Samples:
    """One rank's part; every rank begins and ends together.

    Args:
        narrow: the layers.
        precision: their recipe.
        layout, rank: whose numbers count: of each data-parallel replica's layers those of the first.
        control: the world, over gloo.
    """

    def __init__(
        self, narrow: NarrowLinears, precision: Precision, layout: Layout, rank: int, control: dist.ProcessGroup
    ) -> None:
        self._narrow, self._layout, self._rank, self._control = narrow, layout, rank, control
        self._recipe: Recipe = recipe_of(precision, torch.device("cpu"))
        self._hooks: list[Any] = []
        self._found: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor | None, bool]] = {}

    def begin(self) -> None:
        """Catch the operands of the next micro-batch."""
        place = self._layout.coordinates(self._rank)
        for name, module in self._narrow.layers.items():
            counts = place.edp == 0 if ".experts." in name else place.dp == 0 and place.cp == 0
            if counts:
                self._hooks.append(module.register_forward_pre_hook(partial(self._enters, name)))
                self._hooks.append(module.register_forward_hook(partial(self._leaves, name)))

    def end(self) -> Measured | None:
        """Stop catching, and put the parts of all ranks together.

        Returns:
            What was measured, on rank 0; None elsewhere.

        Collective: gather to rank 0 over the world's control group.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        own = {
            key: (measured.tolist(), None if scale is None else scale.item(), in_bf16)
            for key, (measured, scale, in_bf16) in self._found.items()
        }
        self._found = {}
        everywhere: list[Any] | None = [None] * self._layout.world_size if self._rank == 0 else None
        dist.gather_object(own, everywhere, dst=0, group=self._control)
        if everywhere is None:
            return None
        whole: Measured = {}
        for part in everywhere:
            for key, (measured, scale, in_bf16) in part.items():
                numbers = Numbers.of(measured)
                if key in whole:
                    numbers = whole[key][0] + numbers
                whole[key] = numbers, scale, in_bf16
        return whole

    @torch.no_grad()
    def _enters(self, name: str, module: Any, inputs: tuple[Any, ...]) -> None:
        if (name, "x") not in self._found and torch._C._current_graph_task_id() == -1:
            self._measure(name, "x", module, _normed(module, inputs[0].detach()))
            weights = [weight for part, weight in module.named_parameters(recurse=False) if part.startswith("weight")]
            self._measure(name, "w", module, torch.cat([weight.detach() for weight in weights]))

    def _leaves(self, name: str, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        result = output[0] if isinstance(output, tuple) else output
        if (name, "dy") not in self._found and result.requires_grad:
            result.register_hook(partial(self._gradient, name, module))

    @torch.no_grad()
    def _gradient(self, name: str, module: Any, gradient: torch.Tensor) -> None:
        if (name, "dy") not in self._found:
            self._measure(name, "dy", module, gradient)

    def _measure(self, name: str, operand: str, module: Any, tensor: torch.Tensor) -> None:
        matrix = tensor.reshape(-1, tensor.shape[-1])
        if matrix.numel() == 0:  # an expert without tokens
            return
        scale = None if module.in_bf16 else self._narrow.scale_of(name, operand)
        scale = None if scale is None else scale.clone()
        quantized = partial(self._recipe.quantized, operand, scale=scale)
        self._found[name, operand] = measure(matrix, quantized), scale, module.in_bf16


def _normed(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What the layer multiplies: its input behind the norm that Transformer Engine keeps in some linear layers."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return hidden
    if getattr(module, "zero_centered_gamma", False):
        weight = 1 + weight
    norm: Callable[..., torch.Tensor] = F.rms_norm
    bias = () if module.normalization == "RMSNorm" else (module.layer_norm_bias,)
    if bias:
        norm = F.layer_norm
    return norm(hidden, (hidden.shape[-1],), weight, *bias, eps=module.eps)
