"""Transformer Engine's FP8 context and its reduction of amaxes: the only place that takes hold of them.

Three things differ from what megatron-core 0.19.2 and Transformer Engine do by themselves:

* the group: megatron-core asks `parallel_state.get_amax_reduction_group` and can name TP x DP x CP or TP x CP; here it
  is told the group of `precision.amax_group`;
* non-finite amaxes: Transformer Engine reduces by MAX, which loses a NaN depending on the order of ranks, and then
  writes what is left into the history. Here a flag goes with each amax through the same all-reduce; a flagged tensor
  enters as 0, for which the kernel keeps history and scale;
* layers in BF16: a nested `autocast(enabled=False)` around a layer's forward pass. The reduction belongs to the exit of
  the outermost region (quantization.py:772), so delayed scaling goes on for all others.

Bound to versions that were read (`CHECKED`); a machine rule refuses others.
Source: transformer_engine 2.20.2, pytorch/quantization.py, FP8GlobalStateManager.reduce_and_update_fp8_tensors.
"""

import functools
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
OPERANDS = {FORWARD: ("x", "w", "y"), BACKWARD: ("dy", "dx")}
"""What the columns of a layer's amax history are, once for each of its products.

Source: transformer_engine_torch, FP8FwdTensors and FP8BwdTensors."""


def step_out(module: Any) -> None:
    """Let a layer compute in BF16 whenever its `in_bf16` is true."""
    from transformer_engine.pytorch import autocast

    module.in_bf16 = False
    forward = module.forward

    @functools.wraps(forward)
    def in_its_format(*args: Any, **kwargs: Any) -> Any:
        if not module.in_bf16:
            return forward(*args, **kwargs)
        with autocast(enabled=False):
            return forward(*args, **kwargs)

    module.forward = in_its_format


class AmaxReduction:
    """In the place of Transformer Engine's reduction; one in a process.

    Args:
        group: ranks that share amaxes.
        modules: all layers with FP8 state of this rank by name, the same order on all ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup, modules: dict[str, Any]) -> None:
        self._group, self._modules = group, WeakValueDictionary(modules)  # what is installed outlives a model
        self._own: dict[str, torch.Tensor] = {}
        """Buffer -> which of its amaxes were not finite on this rank."""
        self._bad: torch.Tensor | None = None

    def install(self) -> None:
        """Take Transformer Engine's and megatron-core's place. Every rank calls it before the first forward pass."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

        def group_of_run(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> dist.ProcessGroup:
            return self._group

        def reduce_and_update(forward: bool = True) -> None:
            self._reduce(Manager, forward=forward)

        parallel_state.get_amax_reduction_group = group_of_run
        Manager.reduce_and_update_fp8_tensors = staticmethod(reduce_and_update)

    def _reduce(self, manager: Any, *, forward: bool) -> None:
        """At the end of a region. Collective: all-reduce(MAX) over the group, of an amax and a flag a tensor."""
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.quantization import get_fp8_te_dtype

        state = manager.quantization_state
        for key, amaxes in state.global_amax_buffer.items():
            is_forward, autocast_key = manager.split_key_in_buffer(key)
            if is_forward != forward or not amaxes:
                continue
            recipe, group = state.autocast_arguments[autocast_key]
            amax = torch.cat(amaxes)
            own = ~amax.isfinite()
            buffer = torch.stack([amax.masked_fill(own, 0.0), own.float()])
            if recipe.reduce_amax and dist.get_world_size(group) > 1:
                dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)
            reduced = buffer[0].masked_fill(buffer[1] > 0, 0.0)
            self._remember(key, own, buffer[1].sum())
            # what is not finite must not stay in the row that kernels take their maxima into
            torch._foreach_copy_(amaxes, list(reduced.split([part.numel() for part in amaxes])))
            tex.fused_amax_and_scale_update_after_reduction(
                reduced,
                state.global_amax_history_buffer[key],
                state.global_scale_buffer[key],
                recipe.amax_compute_algo,
                get_fp8_te_dtype(recipe, forward),
                recipe.margin,
            )

    def _remember(self, key: str, own: torch.Tensor, num_bad: torch.Tensor) -> None:
        """On the device, where nothing waits for it, and in place, so that a recorded graph goes on doing it."""
        before = self._own.get(key)
        if before is None or before.numel() != own.numel():  # layers are registered by their first call
            self._own[key] = own.clone()
        else:
            before.logical_or_(own)
        if self._bad is None:
            self._bad = torch.zeros_like(num_bad)
        self._bad += num_bad

    def take_num_bad(self) -> int:
        """How many tensors of the group were not finite since the last call; waits for the device."""
        if self._bad is None:
            return 0
        number = int(self._bad.item())
        self._bad.zero_()
        return number

    def take_own_non_finite(self) -> list[str]:
        """The tensors of this very rank among them, since the last call."""
        found = []
        for name, (key, place) in self._places().items():
            own = self._own.get(key)
            if own is not None and bool(own[place]):
                found.append(name)
        for own in self._own.values():
            own.zero_()
        return found

    def _places(self) -> dict[str, tuple[str, int]]:
        """Tensor -> its buffer, and where in the buffer its amax stands."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

        buffers, found = Manager.quantization_state.global_amax_buffer, {}
        for name, module in self._modules.items():
            placed = module.fp8_meta.get(Manager.get_buffer_info(), [])
            for direction, part, key in zip((FORWARD, BACKWARD), placed[::2], placed[1::2], strict=False):
                start = sum(amaxes.numel() for amaxes in buffers[key][:part])
                for column in range(buffers[key][part].numel()):
                    found[f"{name} {_operand(direction, column)}"] = key, start + column
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Histories and scales on this rank by name."""
        found = {}
        for name, module in self._modules.items():
            for direction in (FORWARD, BACKWARD):
                state = module.fp8_meta.get(direction)
                if state is not None and hasattr(state, "amax_history"):
                    found[f"{name} {direction} amaxes"] = state.amax_history
                    found[f"{name} {direction} scales"] = state.scale
        return found


def scale_of(module: Any, operand: str) -> torch.Tensor | None:
    """The scale that the layer's next call multiplies with; None without delayed scaling, or before its first call."""
    direction = BACKWARD if operand == "dy" else FORWARD
    state = module.fp8_meta.get(direction)
    scales: torch.Tensor | None = getattr(state, "scale", None)
    return None if scales is None else scales[OPERANDS[direction].index(operand)]


def _operand(direction: str, column: int) -> str:
    """`x` of a layer's only product, `x 2` of its third."""
    operands = OPERANDS[direction]
    product, place = divmod(column, len(operands))
    return operands[place] + (f" {product}" if product else "")


def layers_with_state(model: torch.nn.Module) -> dict[str, Any]:
    """Modules of Transformer Engine that keep FP8 state."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    return {name: module for name, module in model.named_modules() if isinstance(module, TransformerEngineBaseModule)}


def linear_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Transformer Engine's linear layers."""
    import transformer_engine.pytorch as te

    kinds = (te.Linear, te.LayerNormLinear, te.GroupedLinear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
