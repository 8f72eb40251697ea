"""Histograms of what is quantised for TensorBoard, where the extra `telemetry` is installed.

Bins are powers of two: what a narrow format can hold is a number of them, so underflow and overflow can be seen as the
ends that are cut off.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.parallel.fp8.statistics import FIRST_EXPONENT, Numbers
from shardwright.pretrain import requirements

_OPERANDS = {"x": "activation", "w": "weight", "dy": "gradient"}


class Histograms:
    """Writes event files into a folder; its writer is made by the first sample, and by rank 0 alone.

    Args:
        folder: of the event files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def write(self, step: int, measured: Mapping[tuple[str, str], Numbers]) -> None:
        """Add the histograms of a sample; nothing where TensorBoard is not installed."""
        if requirements.version("tensorboard") is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        for (layer, operand), numbers in measured.items():
            limits = [float(FIRST_EXPONENT + place + 1) for place in range(len(numbers.histogram))]
            counts = list(numbers.histogram)
            if not sum(counts):
                continue
            centres = [limit - 0.5 for limit in limits]
            self._writer.add_histogram_raw(
                f"log2 of {_OPERANDS[operand]}/{layer}",
                min=limits[0] - 1,
                max=limits[-1],
                num=sum(counts),
                sum=sum(centre * count for centre, count in zip(centres, counts, strict=True)),
                sum_squares=sum(centre**2 * count for centre, count in zip(centres, counts, strict=True)),
                bucket_limits=limits,
                bucket_counts=counts,
                global_step=step,
            )
        self._writer.flush()
