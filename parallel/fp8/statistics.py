"""What a recipe does to an operand, in numbers: how much vanishes, how much saturates, how much noise is added.

The operand is quantised by the very functions of `quantize`, whoever computes the layer, so the numbers exist for every
recipe and mean the same for all. Of a large matrix evenly spaced bands of 128 rows are looked at (a block's height);
its amax is always the whole one's. Everything stays on the device until somebody asks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from shardwright.parallel.fp8.quantize import BLOCK, Quantized, amax_of

MOST_ELEMENTS = 1 << 20
"""Of a matrix that are quantised; what bounds the cost."""
FIRST_EXPONENT, NUM_BINS = -40, 64
"""The histogram's bins are powers of two: the first one has all up to 2^-40, the last one all above 2^22."""
_BY_ROUNDING = 1 + 2.0**-20
"""A scale is rounded, so the largest number may pass the format's by this factor without losing anything."""

COUNTS = ("amax", "elements", "non_finite", "underflow", "overflow", "signal", "noise")


def measure(matrix: torch.Tensor, quantized: Callable[[torch.Tensor, torch.Tensor], Quantized]) -> torch.Tensor:
    """Numbers of one operand that add up over ranks (all but the first, of which the largest counts).

    Args:
        matrix: [M, K], summed by the product along K.
        quantized: from rows of the matrix and the whole matrix's amax, fp32 [], to their codes.

    Returns:
        float64 [7 + `NUM_BINS`]: `COUNTS`, of which signal and noise are sums of squares, and the histogram.
    """
    amax = amax_of(matrix)
    rows = _bands(matrix).float()
    finite = rows.isfinite()
    rows = rows.masked_fill(~finite, 0.0)
    kept = torch.where(amax.isfinite(), amax, amax_of(rows))
    codes = quantized(rows, kept)
    numbers = codes.dequantize()
    exponents = torch.frexp(rows)[1].clamp(FIRST_EXPONENT, FIRST_EXPONENT + NUM_BINS - 1) - FIRST_EXPONENT
    histogram = torch.bincount(exponents[rows != 0].flatten().long(), minlength=NUM_BINS)
    counts = [
        amax.double(),
        torch.tensor(float(rows.numel()), dtype=torch.float64, device=rows.device),
        (~finite).sum(),
        ((rows != 0) & (numbers == 0)).sum(),
        (rows.abs() > codes.largest() * _BY_ROUNDING).sum(),
        rows.double().square().sum(),
        (rows - numbers).double().square().sum(),
    ]
    return torch.cat([torch.stack([count.double() for count in counts]), histogram.double()])


def _bands(matrix: torch.Tensor) -> torch.Tensor:
    """All rows, or evenly spaced bands of them."""
    rows, columns = matrix.shape
    num_bands = max(1, MOST_ELEMENTS // (BLOCK * max(columns, 1)))
    if matrix.numel() <= MOST_ELEMENTS or rows <= BLOCK * num_bands:
        return matrix
    starts = [band * (rows // BLOCK) // num_bands * BLOCK for band in range(num_bands)]
    return torch.cat([matrix[start : start + BLOCK] for start in starts])


@dataclass(frozen=True, slots=True)
class Numbers:
    """Of one operand of one layer, over all ranks that have a part of it."""

    amax: float
    elements: float
    non_finite: float
    underflow: float
    """Elements that are not 0 and become 0."""
    overflow: float
    """Elements beyond the largest number, which saturate."""
    signal: float
    noise: float
    histogram: tuple[int, ...]
    """How many elements there are of each power of two, from 2^`FIRST_EXPONENT`; zeros are left out."""

    @classmethod
    def of(cls, measured: list[float]) -> Self:
        """From what `measure` gave."""
        counts: dict[str, Any] = dict(zip(COUNTS, measured, strict=False))
        return cls(**counts, histogram=tuple(int(count) for count in measured[len(COUNTS) :]))

    def __add__(self, other: "Numbers") -> "Numbers":
        sums = {name: getattr(self, name) + getattr(other, name) for name in COUNTS[1:]}
        histogram = tuple(own + more for own, more in zip(self.histogram, other.histogram, strict=True))
        largest = self.amax if math.isnan(self.amax) else max(other.amax, self.amax)
        return Numbers(amax=largest, **sums, histogram=histogram)

    @property
    def underflow_share(self) -> float:
        """Of all elements."""
        return self.underflow / max(self.elements, 1)

    @property
    def overflow_share(self) -> float:
        """Of all elements."""
        return self.overflow / max(self.elements, 1)

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantisation noise in decibel; None without either."""
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 and self.noise > 0 else None
