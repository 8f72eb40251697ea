"""Narrow number formats on any device: which code a number becomes, and which number a code is.

Codes are bytes (`uint8`), numbers are fp32. Rounding is to the nearest, ties to the even code. Beyond the largest
number a format saturates, as the GPU's conversions do (`cvt.rn.satfinite`); torch's plain cast does not: it makes NaN
of every number above 464 in E4M3. NaN stays NaN where a format has one; what infinities become, the caller says.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch

FP32_MAX = torch.finfo(torch.float32).max


class Infinity(Enum):
    """What an infinity becomes."""

    saturate = "saturate"
    """The largest number of the format, as on a GPU."""
    nan = "nan"
    """NaN, so that it is seen."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of at most eight bits with a sign."""

    name: str
    max: float
    """The largest number."""
    dtype: torch.dtype | None
    """torch's name for it; None for E2M1, with which torch does not compute."""


E4M3 = Format("e4m3", 448.0, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 57344.0, torch.float8_e5m2)
E2M1 = Format("e2m1", 6.0, None)
"""Four bits, without NaN and infinity."""

_E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BORDERS = tuple((low + high) / 2 for low, high in pairwise(_E2M1_NUMBERS))
_E2M1_SIGN = 8


def encode(numbers: torch.Tensor, format: Format, infinity: Infinity = Infinity.saturate) -> torch.Tensor:
    """The codes of fp32 numbers.

    Args:
        numbers: fp32, any shape.
        format: of the codes.
        infinity: what an infinity becomes; E2M1 always saturates, and has +6 for NaN.

    Returns:
        uint8, the same shape.
    """
    assert numbers.dtype == torch.float32, numbers.dtype
    if infinity is Infinity.nan:
        numbers = numbers.masked_fill(numbers.isinf(), torch.nan)
    clamped = numbers.clamp(-format.max, format.max)  # NaN passes through
    if format.dtype is not None:
        return clamped.to(format.dtype).view(torch.uint8)
    size = clamped.nan_to_num(nan=format.max).abs()
    borders = torch.tensor(_E2M1_BORDERS, device=numbers.device)
    below = torch.bucketize(size, borders, right=False)  # a number on a border counts to the lower one
    above = torch.bucketize(size, borders, right=True)
    codes = torch.where(below % 2 == 0, below, above)  # ... or to the upper one, where that is the even code
    return (codes + _E2M1_SIGN * (clamped.signbit() & ~clamped.isnan())).to(torch.uint8)


def encode_by_chance(numbers: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """E2M1 codes that stand for the numbers on average: the nearer of both neighbours is the likelier one.

    Args:
        numbers: fp32, any shape; NaN becomes +6.
        uniform: fp32, the same shape, random numbers from [0, 1).

    Returns:
        uint8, the same shape.
    """
    clamped = numbers.clamp(-E2M1.max, E2M1.max)
    size = clamped.nan_to_num(nan=E2M1.max).abs()
    known = torch.tensor(_E2M1_NUMBERS, device=numbers.device)
    below = torch.bucketize(size, known, right=True) - 1
    low, high = known[below], known[(below + 1).clamp(max=len(_E2M1_NUMBERS) - 1)]
    codes = below + (uniform * (high - low) < size - low)
    return (codes + _E2M1_SIGN * (clamped.signbit() & ~clamped.isnan())).to(torch.uint8)


def decode(codes: torch.Tensor, format: Format) -> torch.Tensor:
    """The fp32 numbers of codes."""
    assert codes.dtype == torch.uint8, codes.dtype
    if format.dtype is not None:
        return codes.view(format.dtype).float()
    numbers = torch.tensor([*_E2M1_NUMBERS, *(-number for number in _E2M1_NUMBERS)], device=codes.device)
    return numbers[codes.long()]


def encode_e8m0(numbers: torch.Tensor) -> torch.Tensor:
    """The exponent byte of the least power of two that is not below each number; powers of two alone, no sign.

    Args:
        numbers: fp32, none negative.

    Returns:
        uint8: 2^(code - 127); 255 for NaN, 254 for infinity and whatever is above 2^127.

    Source: transformer_engine 2.20, common/utils.cuh, float_to_e8m0.
    """
    bits = numbers.view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent < 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = torch.where(numbers.isnan(), 255, torch.where(numbers.isinf(), 254, exponent + up))
    return code.to(torch.uint8)


def reciprocal_of_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """What numbers are multiplied with before they are rounded: 2^(127 - code) in fp32, 1 for code 0.

    Source: transformer_engine 2.20, common/utils.cuh, exp2f_rcp; so also 0 for 254, for which 2^-127 is too small.
    """
    powers = (254 - codes.to(torch.int32) << 23).view(torch.float32)
    return torch.where(codes == 0, torch.ones_like(powers), powers)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """2^(code - 127) in fp32; NaN for 255."""
    powers = (codes.to(torch.int32) << 23).view(torch.float32)
    return torch.where(codes == 0, 2.0**-127, powers).masked_fill(codes == 255, torch.nan)
