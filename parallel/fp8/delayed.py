"""Delayed scaling with its state: amax histories, and one reduction for all tensors of a region.

A layer quantises with scales of earlier micro-batches and notes the amax of what it saw. At the end of a region, which
is the forward pass of one micro-batch through the layers of a rank, or its backward pass, the amaxes of all layers go
through one all-reduce(MAX); histories roll, and scales follow them. So scales are the same on all ranks of the group.

MAX alone would lose a NaN, depending on the order of ranks. So a flag goes with each amax: a tensor with a NaN or an
infinity on any rank keeps its history and its scale on all of them, and is named. A layer that was not called on any
rank (an expert without tokens) keeps its history too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardwright.parallel.fp8 import quantize
from shardwright.parallel.fp8.formats import Format
from shardwright.parallel.fp8.linear import Pair
from shardwright.parallel.fp8.quantize import Quantized

OPERANDS = ("x", "w", "dy")
"""What a layer keeps a history of; the first two belong to its forward pass."""


@dataclass(slots=True)
class History:
    """Of one operand of one layer."""

    format: Format
    amaxes: torch.Tensor
    """fp32 [history length]; the newest last."""
    scale: torch.Tensor
    """fp32 []; what the next call multiplies with."""
    seen: torch.Tensor
    """fp32 []: the largest amax of this region; NaN and infinity stay."""
    called: bool = False
    """Whether this region had the operand at all."""

    @classmethod
    def new(cls, length: int, format: Format, device: torch.device) -> "History":
        """Without any amax; the scale is 1."""
        zero = torch.zeros((), device=device)
        return cls(format, torch.zeros(length, device=device), torch.ones((), device=device), zero)

    def note(self, matrix: torch.Tensor) -> None:
        """Take the amax of what is quantised now into the region's."""
        if matrix.numel():
            self.seen, self.called = torch.maximum(self.seen, quantize.amax_of(matrix)), True

    def roll(self, amax: torch.Tensor, margin: int, *, largest: bool) -> None:
        """Append the reduced amax of the region, and let the scale follow the history.

        Args:
            amax: fp32 [], finite.
            margin: powers of two left free.
            largest: take the largest amax of the history, else the newest.
        """
        self.amaxes = torch.cat([self.amaxes[1:], amax[None]])
        chosen = self.amaxes.max() if largest else amax
        self.scale = quantize.delayed_scale(chosen, self.scale, self.format, margin)

    def forget_region(self) -> None:
        """Begin the next region."""
        self.seen, self.called = torch.zeros_like(self.seen), False


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a layer: the scales of the moment, and whose amaxes it notes."""

    histories: Mapping[str, History]
    scales: Mapping[str, torch.Tensor]
    notes: bool

    def _quantized(self, operand: str, matrix: torch.Tensor) -> torch.Tensor:
        return quantize.by_tensor(matrix, self.histories[operand].format, self.scales[operand]).dequantize()

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Pair:
        if self.notes and x.numel():  # an expert without tokens was not called
            self.histories["x"].note(x)
            self.histories["w"].note(w)
        return self._quantized("x", x), self._quantized("w", w)

    def data_gradient(self, dy: torch.Tensor, w: torch.Tensor) -> Pair:
        history = self.histories["dy"]
        history.note(dy)
        return quantize.by_tensor(dy, history.format, history.scale).dequantize(), self._quantized("w", w)

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> Pair:
        history = self.histories["dy"]
        return quantize.by_tensor(dy, history.format, history.scale).dequantize(), self._quantized("x", x)


class DelayedScaling:
    """A layer's recipe.

    Args:
        length: of the histories.
        forward, backward: formats of X and W, and of dY.
        device: of the state.
    """

    def __init__(self, length: int, forward: Format, backward: Format, device: torch.device) -> None:
        formats = (forward, forward, backward)
        self.histories = {
            operand: History.new(length, format, device) for operand, format in zip(OPERANDS, formats, strict=True)
        }
        self._to_be_recomputed: list[dict[str, torch.Tensor]] = []

    def quantized(
        self, operand: str, matrix: torch.Tensor, amax: torch.Tensor, *, scale: torch.Tensor | None = None
    ) -> Quantized:
        """As `linear.Recipe`; without a scale by the one that `amax` gives."""
        format = self.histories[operand].format
        return quantize.by_tensor(matrix, format, quantize.current_scale(amax, format) if scale is None else scale)

    def products(self, *, training: bool = True) -> _Call:
        """For one call of the layer.

        A layer that is recomputed is called twice for one micro-batch: first without gradients, then inside of the
        backward pass, when scales have moved on. The second call takes the scales of the first and notes nothing.

        Args:
            training: whether the layer trains; in evaluation nothing is noted.
        """
        scales = {operand: history.scale for operand, history in self.histories.items()}
        if not training:
            return _Call(self.histories, scales, notes=False)
        if torch._C._current_graph_task_id() != -1:  # inside of a backward pass
            return _Call(self.histories, self._to_be_recomputed.pop(0), notes=False)
        if not torch.is_grad_enabled():
            self._to_be_recomputed.append(scales)
        return _Call(self.histories, scales, notes=True)


@dataclass(slots=True)
class Regions:
    """All layers of a rank with delayed scaling: ends their regions.

    Args:
        layers: by name, in the same order on all ranks of the group.
        group: ranks that share scales; None for this rank alone.
        margin: powers of two left free above amax.
        largest: scales follow the largest amax of the history, else the newest.
    """

    layers: Mapping[str, DelayedScaling]
    group: dist.ProcessGroup | None
    margin: int
    largest: bool
    slots: Sequence[str] = ()
    """Names of the layers of all ranks of the group, in one order: experts of other ranks have a place among them, so
    that an expert shares its scales with its own copies alone. Empty where all ranks have the same layers."""
    non_finite: list[str] = field(default_factory=list)
    """Tensors whose last region had a NaN or an infinity on a rank of the group."""
    own_non_finite: dict[str, None] = field(default_factory=dict)
    """Tensors with a NaN or an infinity on this very rank since somebody emptied it."""
    num_bad: int = 0
    """How many tensors of the group were not finite since somebody set it to 0; the same on all of its ranks."""

    def end_forward(self) -> None:
        """After a micro-batch's forward pass. Collective: all-reduce(MAX) over the group."""
        self._end(("x", "w"))

    def end_backward(self) -> None:
        """After a micro-batch's backward pass. Collective: all-reduce(MAX) over the group."""
        self._end(("dy",))

    def _end(self, operands: tuple[str, ...]) -> None:
        slots = {name: place for place, name in enumerate(self.slots or self.layers)}
        names = [f"{name} {operand}" for name in slots for operand in operands]
        if not names:
            return
        own = {
            f"{name} {operand}": layer.histories[operand] for name, layer in self.layers.items() for operand in operands
        }
        places = torch.tensor([place for place, name in enumerate(names) if name in own], dtype=torch.long)
        histories = [own[name] for name in names if name in own]
        seen = torch.stack([history.seen for history in histories])
        called = torch.tensor([float(history.called) for history in histories], device=seen.device)
        finite = seen.isfinite()
        buffer = torch.zeros(3, len(names), device=seen.device)
        buffer[:, places.to(seen.device)] = torch.stack([seen.masked_fill(~finite, 0.0), called, (~finite).float()])
        self._note_own(names, places.tolist(), finite.tolist())
        if self.group is not None:
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=self.group)
        flags = buffer[2].tolist()
        self.non_finite = [name for name, flag in zip(names, flags, strict=True) if flag]
        self.num_bad += len(self.non_finite)
        amaxes, was_called = buffer[0, places.to(seen.device)], buffer[1].tolist()
        for history, place, amax in zip(histories, places.tolist(), amaxes, strict=True):
            if was_called[place] and not flags[place]:
                history.roll(amax, self.margin, largest=self.largest)
            history.forget_region()

    def _note_own(self, names: list[str], places: list[int], finite: list[bool]) -> None:
        for place, is_finite in zip(places, finite, strict=True):
            if not is_finite:
                self.own_non_finite[names[place]] = None
