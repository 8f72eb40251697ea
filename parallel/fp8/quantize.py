"""The scaling recipes on any device: from a matrix to codes and scales, and back.

A scale multiplies before rounding; its reciprocal, which a GEMM needs, is kept beside the codes. What a scale covers
makes the recipe: a tensor (delayed and current scaling), a block of 1 x 128 or 128 x 128, of 1 x 32 (MXFP8), or of
1 x 16 under a scale of the whole tensor (NVFP4). Blocks lie along the dimension over which the GEMM sums, the last one
here: the transpose is quantised anew, except for square blocks, whose transpose has the same codes.

Every formula is the one of Transformer Engine's kernels, to the bit, with its source beside it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardwright.parallel.fp8.formats import (
    E2M1,
    E4M3,
    FP32_MAX,
    Format,
    decode,
    decode_e8m0,
    encode,
    encode_by_chance,
    encode_e8m0,
    reciprocal_of_e8m0,
)

BLOCK, MX_BLOCK, NV_BLOCK = 128, 32, 16
"""Elements that share a scale: blockwise, MXFP8, NVFP4."""
_SIGNS = (1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0)
"""Random once, and the same ever since. Source: transformer_engine 2.20.2, nvfp4_tensor.py, get_wgrad_sign_vector."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [M, K] in a narrow format."""

    codes: torch.Tensor
    """uint8 [M, K]; E2M1 one code a byte."""
    scale_inv: torch.Tensor
    """fp32, what decoded codes are multiplied with: [] for the tensor, else one number a block."""
    format: Format
    block: tuple[int, int]
    """Rows and columns that share a scale; (0, 0) for the whole tensor."""

    def dequantize(self) -> torch.Tensor:
        """The fp32 matrix [M, K] that the codes stand for."""
        return decode(self.codes, self.format) * self._spread()

    def largest(self) -> torch.Tensor:
        """The largest number that each element's scale leaves room for, fp32 [] or [M, K]."""
        return self._spread() * self.format.max

    def _spread(self) -> torch.Tensor:
        """`scale_inv` of every element: [] for the whole tensor, else [M, K]."""
        rows, columns = self.codes.shape
        if self.block == (0, 0):
            return self.scale_inv
        spread = self.scale_inv.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return spread[:rows, :columns]


def amax_of(matrix: torch.Tensor) -> torch.Tensor:
    """Largest absolute value, fp32 []; NaN if there is one; 0 for an empty tensor."""
    return matrix.abs().amax().float() if matrix.numel() else torch.zeros((), device=matrix.device)


def delayed_scale(amax: torch.Tensor, scale: torch.Tensor, format: Format, margin: int) -> torch.Tensor:
    """The next scale of delayed scaling: (largest number / amax) / 2^margin.

    The former scale stays where amax is 0, infinite or NaN; a tiny amax gives the largest fp32 number, not infinity.

    Args:
        amax: fp32, any shape, read from the history.
        scale: the former scales, the same shape.
        format: whose largest number amax becomes.
        margin: powers of two left free above it.

    Source: transformer_engine 2.20.2, pytorch/quantization.py, _default_sf_compute.
    """
    new = (format.max / amax) / 2.0**margin
    new = torch.where((amax > 0) & amax.isfinite(), new, scale)
    return torch.where(new.isinf(), FP32_MAX, new)


def current_scale(amax: torch.Tensor, format: Format, *, power_of_two: bool = False) -> torch.Tensor:
    """The scale of a tensor's or block's present amax; 1 where amax is 0, infinite or NaN.

    Source: transformer_engine 2.20, common/recipe/recipe_common.cuh, compute_scale_from_amax.
    """
    scale = torch.where((format.max / amax).isinf(), FP32_MAX, format.max / amax)
    if power_of_two:  # rounded down
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax == 0) | ~amax.isfinite(), torch.ones_like(amax), scale)


def by_tensor(matrix: torch.Tensor, format: Format, scale: torch.Tensor) -> Quantized:
    """One scale [] for all of the matrix: delayed and current scaling."""
    codes = encode(matrix.float() * scale, format)
    return Quantized(codes, scale.reciprocal(), format, (0, 0))


def by_blocks(matrix: torch.Tensor, format: Format, block: tuple[int, int]) -> Quantized:
    """A power of two for each block of (1, 128) or (128, 128); a block at an edge may be smaller."""
    blocks = _blocks(matrix.float(), block)
    scale = current_scale(blocks.abs().amax((1, 3)), format, power_of_two=True)
    codes = encode(blocks * scale[:, None, :, None], format)
    return Quantized(_matrix(codes, matrix.shape), scale.reciprocal(), format, block)


def mxfp8(matrix: torch.Tensor, format: Format = E4M3) -> Quantized:
    """A power of two for each 1 x 32, as an exponent byte: the least that brings the block into the format.

    Source: transformer_engine 2.20, common/cast/mxfp8/quantize_mxfp8.cuh.
    """
    blocks = _blocks(matrix.float(), (1, MX_BLOCK))
    exponents = encode_e8m0(blocks.abs().amax((1, 3)) * (1.0 / format.max))
    codes = encode(blocks * reciprocal_of_e8m0(exponents)[:, None, :, None], format)
    return Quantized(_matrix(codes, matrix.shape), decode_e8m0(exponents), format, (1, MX_BLOCK))


def nvfp4(
    matrix: torch.Tensor, *, square: bool = False, amax: torch.Tensor | None = None, by_chance: bool = False
) -> Quantized:
    """E2M1 with two scales: fp32 for the tensor, E4M3 for each 1 x 16, or 16 x 16 for weights.

    Args:
        matrix: [M, K].
        square: blocks of 16 x 16.
        amax: fp32 [], of a tensor that the matrix is a part of; None for the matrix's own.
        by_chance: round stochastically, with numbers of torch's default generator.

    Source: transformer_engine 2.20.2, pytorch/custom_recipes/reference_nvfp4.py, _quantize_blockwise_reference.
    """
    block = (NV_BLOCK if square else 1, NV_BLOCK)
    blocks = _blocks(matrix.float(), block)
    encode_scale = (E4M3.max * E2M1.max / (amax_of(matrix) if amax is None else amax)).clamp(max=FP32_MAX)
    encode_scale = torch.where(encode_scale == 0, torch.ones_like(encode_scale), encode_scale)
    multiplier = encode_scale * torch.tensor(E2M1.max, device=matrix.device).reciprocal()
    stored = decode(encode((blocks.abs().amax((1, 3)) * multiplier).clamp(max=FP32_MAX), E4M3), E4M3)
    scale_inv = stored * encode_scale.reciprocal()
    scale = scale_inv.reciprocal().clamp(max=FP32_MAX)
    scaled = blocks * scale[:, None, :, None]
    codes = encode_by_chance(scaled, torch.rand_like(scaled)) if by_chance else encode(scaled, E2M1)
    return Quantized(_matrix(codes, matrix.shape), scale_inv, E2M1, block)


def hadamard(matrix: torch.Tensor) -> torch.Tensor:
    """Rows in blocks of 16 by a Hadamard matrix with random signs, which spreads an outlier over its block.

    It is orthogonal: a product of two matrices that are summed over this dimension stays what it is.

    Args:
        matrix: [M, K].

    Returns:
        fp32 [M, K], K filled with zeros up to a multiple of 16.

    Source: transformer_engine 2.20.2, pytorch/tensor/nvfp4_tensor.py, get_rht_matrix; there in BF16.
    """
    order = torch.ones(1, 1, device=matrix.device)
    for _ in range(NV_BLOCK.bit_length() - 1):  # Sylvester's construction
        order = torch.cat([torch.cat([order, order], 1), torch.cat([order, -order], 1)])
    signs = torch.tensor(_SIGNS, device=matrix.device)
    padded = F.pad(matrix.float(), (0, -matrix.shape[1] % NV_BLOCK))
    transformed: torch.Tensor = padded.reshape(-1, NV_BLOCK) @ (signs[:, None] * order / NV_BLOCK**0.5)
    return transformed.view(padded.shape)


def _blocks(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[M, K] as [M / rows, rows, K / columns, columns], filled with zeros up to whole blocks."""
    (rows, columns), (height, width) = matrix.shape, block
    padded = F.pad(matrix, (0, -columns % width, 0, -rows % height))
    return padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)


def _matrix(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `_blocks`."""
    whole = blocks.reshape(blocks.shape[0] * blocks.shape[1], -1)
    return whole[: shape[0], : shape[1]].contiguous()
