"""A linear layer's three matrix products with operands in a narrow format, and their results as a GPU would have them.

    forward          Y  [T, N] = X  [T, K] @ W  [N, K].T     sums over K
    data gradient    dX [T, K] = dY [T, N] @ W  [N, K]       sums over N
    weight gradient  dW [N, K] = dY [T, N].T @ X [T, K]      sums over T

A recipe quantises both operands of a product; the product itself is made in fp32 of the very numbers that the codes
stand for. A tensor core sums them in another order, so results agree within rounding and codes agree exactly.
"""

from typing import Any, Protocol

import torch

from shardwright.parallel.fp8 import quantize
from shardwright.parallel.fp8.formats import E4M3, Format
from shardwright.parallel.fp8.quantize import BLOCK, Quantized

type Pair = tuple[torch.Tensor, torch.Tensor]
"""Both operands of a product, as the fp32 numbers that their codes stand for."""


class Products(Protocol):
    """How the operands of one call's three products are quantised; X [T, K], W [N, K], dY [T, N]."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Pair:
        """X and W."""

    def data_gradient(self, dy: torch.Tensor, w: torch.Tensor) -> Pair:
        """dY and W."""

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> Pair:
        """dY and X."""


class Recipe(Protocol):
    """How a layer quantises."""

    def quantized(
        self, operand: str, matrix: torch.Tensor, amax: torch.Tensor, *, scale: torch.Tensor | None = None
    ) -> Quantized:
        """An operand as this recipe quantises it along its last dimension; leaves the recipe's state alone.

        Args:
            operand: x, w or dy.
            matrix: fp32 [M, K], rows of the operand.
            amax: fp32 [], of the whole operand.
            scale: of delayed scaling; None for the one that `amax` gives.
        """

    def products(self, *, training: bool = True) -> Products:
        """For one call of the layer; what it takes from the layer's state stays as it is until its backward pass.

        Args:
            training: whether the layer trains; in evaluation its state stays as it is.
        """


class _Stateless:
    """A recipe without state serves every call itself."""

    def products(self, *, training: bool = True) -> Any:
        return self


class CurrentScaling(_Stateless):
    """One scale a tensor, from its present amax.

    Args:
        forward, backward: formats of X and W, and of dY.
    """

    def __init__(self, forward: Format, backward: Format) -> None:
        self._forward, self._backward = forward, backward

    def quantized(
        self, operand: str, matrix: torch.Tensor, amax: torch.Tensor, *, scale: torch.Tensor | None = None
    ) -> Quantized:
        """As `Recipe`."""
        format = self._backward if operand == "dy" else self._forward
        return quantize.by_tensor(matrix, format, quantize.current_scale(amax, format) if scale is None else scale)

    def _quantized(self, matrix: torch.Tensor, format: Format) -> torch.Tensor:
        scale = quantize.current_scale(quantize.amax_of(matrix), format)
        return quantize.by_tensor(matrix, format, scale).dequantize()

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Pair:
        return self._quantized(x, self._forward), self._quantized(w, self._forward)

    def data_gradient(self, dy: torch.Tensor, w: torch.Tensor) -> Pair:
        return self._quantized(dy, self._backward), self._quantized(w, self._forward)

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> Pair:
        return self._quantized(dy, self._backward), self._quantized(x, self._forward)


class BlockScaling(_Stateless):
    """Powers of two: 128 x 128 for W, 1 x 128 for X and dY, along the dimension that is summed."""

    def __init__(self, forward: Format = E4M3, backward: Format = E4M3) -> None:
        self._forward, self._backward = forward, backward

    def quantized(
        self, operand: str, matrix: torch.Tensor, amax: torch.Tensor, *, scale: torch.Tensor | None = None
    ) -> Quantized:
        """As `Recipe`."""
        format = self._backward if operand == "dy" else self._forward
        return quantize.by_blocks(matrix, format, (BLOCK if operand == "w" else 1, BLOCK))

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Pair:
        return _rows(x, self._forward), quantize.by_blocks(w, self._forward, (BLOCK, BLOCK)).dequantize()

    def data_gradient(self, dy: torch.Tensor, w: torch.Tensor) -> Pair:
        return _rows(dy, self._backward), quantize.by_blocks(w, self._forward, (BLOCK, BLOCK)).dequantize()

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> Pair:
        return _rows(dy.T, self._backward).T, _rows(x.T, self._forward).T


def _rows(matrix: torch.Tensor, format: Format) -> torch.Tensor:
    return quantize.by_blocks(matrix, format, (1, BLOCK)).dequantize()


class Mxfp8(_Stateless):
    """An exponent for each 1 x 32, along the dimension that is summed."""

    def __init__(self, forward: Format = E4M3, backward: Format = E4M3) -> None:
        self._forward, self._backward = forward, backward

    def quantized(
        self, operand: str, matrix: torch.Tensor, amax: torch.Tensor, *, scale: torch.Tensor | None = None
    ) -> Quantized:
        """As `Recipe`."""
        return quantize.mxfp8(matrix, self._backward if operand == "dy" else self._forward)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Pair:
        return quantize.mxfp8(x, self._forward).dequantize(), quantize.mxfp8(w, self._forward).dequantize()

    def data_gradient(self, dy: torch.Tensor, w: torch.Tensor) -> Pair:
        return quantize.mxfp8(dy, self._backward).dequantize(), quantize.mxfp8(w.T, self._forward).dequantize().T

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> Pair:
        return quantize.mxfp8(dy.T, self._backward).dequantize().T, quantize.mxfp8(x.T, self._forward).dequantize().T


class Nvfp4(_Stateless):
    """E2M1: 16 x 16 for W, 1 x 16 for X and dY, along the dimension that is summed.

    Args:
        hadamard: transform both operands of the weight gradient, along the tokens.
        by_chance: round dY stochastically, so that small gradients do not vanish on average.

    Source of both: arXiv:2509.25149; transformer_engine 2.20.2, common/recipe, NVFP4BlockScaling.
    """

    def __init__(self, *, hadamard: bool = False, by_chance: bool = False) -> None:
        self._hadamard, self._by_chance = hadamard, by_chance

    def quantized(
        self, operand: str, matrix: torch.Tensor, amax: torch.Tensor, *, scale: torch.Tensor | None = None
    ) -> Quantized:
        """As `Recipe`; to the nearest number always."""
        return quantize.nvfp4(matrix, square=operand == "w", amax=amax)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Pair:
        return quantize.nvfp4(x).dequantize(), quantize.nvfp4(w, square=True).dequantize()

    def data_gradient(self, dy: torch.Tensor, w: torch.Tensor) -> Pair:
        return quantize.nvfp4(dy, by_chance=self._by_chance).dequantize(), quantize.nvfp4(w, square=True).dequantize()

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> Pair:
        dy_NT, x_KT = dy.T, x.T
        if self._hadamard:
            dy_NT, x_KT = quantize.hadamard(dy_NT), quantize.hadamard(x_KT)
        left = quantize.nvfp4(dy_NT, by_chance=self._by_chance).dequantize()
        return left.T, quantize.nvfp4(x_KT).dequantize().T


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, products: Products) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.products = products
        left, right = products.forward(x.reshape(-1, x.shape[-1]), w)
        return (left @ right.T).to(x.dtype).view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, w = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        left, right = ctx.products.data_gradient(rows, w)
        dx = (left @ right).to(x.dtype).view(x.shape)
        left, right = ctx.products.weight_gradient(rows, x.reshape(-1, x.shape[-1]))
        return dx, (left.T @ right).to(w.dtype), None


def linear(x: torch.Tensor, w: torch.Tensor, recipe: Recipe, *, training: bool = True) -> torch.Tensor:
    """X [..., K] @ W [N, K].T, differentiable, with all three products by `recipe`."""
    result: torch.Tensor = _Linear.apply(x, w, recipe.products(training=training))
    return result
