"""The emulation against Transformer Engine's kernels: scales and codes to the bit, products within their rounding."""

from collections.abc import Callable

import pytest
import torch

from shardwright.parallel.fp8 import quantize
from shardwright.parallel.fp8.formats import E4M3, E5M2, Format
from shardwright.parallel.fp8.linear import BlockScaling, CurrentScaling, Recipe, linear

pytestmark = pytest.mark.gpu

PRODUCT = 4e-3
"""Relative, of a product: Transformer Engine rounds its result to BF16 (2^-9) and sums in another order."""
SHAPES = [(256, 512), (512, 128), (1024, 384)]


def matrices(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Random BF16 matrices: plain, with outliers, tiny, and with a block of zeros."""
    generator = torch.Generator("cuda").manual_seed(5)
    plain = torch.randn(shape, device="cuda", generator=generator)
    outliers = plain.clone()
    outliers[torch.rand(shape, device="cuda", generator=generator) < 1e-3] *= 1e4
    zeros = plain.clone()
    zeros[:128, :128] = 0
    found = {"plain": plain, "outliers": outliers, "tiny": plain * 1e-30, "zeros": zeros}
    return {name: matrix.bfloat16() for name, matrix in found.items()}


def te_dtype(format: Format) -> object:
    from transformer_engine.pytorch.constants import DType

    return {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}[format.name]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
def test_delayed_scaling_s_codes_are_transformer_engine_s(format: Format, shape: tuple[int, int]) -> None:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    for name, matrix in matrices(shape).items():
        for scale in (1.0, 56.0, 0.37):
            kept, amax = torch.tensor([scale], device="cuda"), torch.zeros(1, device="cuda")
            theirs = Float8Quantizer(kept, amax, te_dtype(format), columnwise=False)(matrix)
            ours = quantize.by_tensor(matrix, format, kept[0])
            assert torch.equal(theirs._data, ours.codes), name
            assert torch.equal(theirs._scale_inv, ours.scale_inv[None]), name
            assert amax[0] == quantize.amax_of(matrix), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
def test_current_scaling_s_scales_and_codes_are_transformer_engine_s(format: Format, shape: tuple[int, int]) -> None:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    for name, matrix in matrices(shape).items():
        theirs = Float8CurrentScalingQuantizer(te_dtype(format), torch.device("cuda"), columnwise=False)(matrix)
        ours = quantize.by_tensor(matrix, format, quantize.current_scale(quantize.amax_of(matrix), format))
        assert torch.equal(theirs._scale_inv, ours.scale_inv[None]), name
        assert torch.equal(theirs._data, ours.codes), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
def test_block_scales_and_codes_are_transformer_engine_s(block: tuple[int, int], shape: tuple[int, int]) -> None:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    dimensions = 2 if block[0] > 1 else 1
    for name, matrix in matrices(shape).items():
        quantizer = Float8BlockQuantizer(te_dtype(E4M3), rowwise=True, columnwise=False, block_scaling_dim=dimensions)
        theirs, ours = quantizer(matrix), quantize.by_blocks(matrix, E4M3, block)
        scales = theirs._rowwise_scale_inv if dimensions == 2 else theirs._rowwise_scale_inv.T
        assert torch.equal(scales[: ours.scale_inv.shape[0], : ours.scale_inv.shape[1]], ours.scale_inv), name
        assert torch.equal(theirs._rowwise_data, ours.codes), name


def recipes() -> dict[str, tuple[Callable[[], object], Recipe]]:
    """Transformer Engine's recipes, and ours."""
    from transformer_engine.common import recipe

    return {
        "current": (lambda: recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID), CurrentScaling(E4M3, E5M2)),
        "blockwise": (lambda: recipe.Float8BlockScaling(fp8_format=recipe.Format.E4M3), BlockScaling()),
    }


@pytest.mark.parametrize("name", ["current", "blockwise"])
def test_all_three_products_agree_within_their_rounding(name: str) -> None:
    import transformer_engine.pytorch as te

    make, ours = recipes()[name]
    generator = torch.Generator("cuda").manual_seed(6)
    theirs = te.Linear(512, 384, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(1024, 512, device="cuda", generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(1024, 384, device="cuda", generator=generator).bfloat16()
    with te.autocast(enabled=True, recipe=make()):
        y = theirs(x)
    y.backward(dy)
    own_x, own_w = x.detach().float().requires_grad_(), theirs.weight.detach().float().requires_grad_()
    own_y = linear(own_x, own_w, ours)
    own_y.backward(dy.float())
    assert x.grad is not None and own_x.grad is not None and own_w.grad is not None
    for result, expected in ((y, own_y), (x.grad, own_x.grad), (theirs.weight.grad, own_w.grad)):
        error = (result.float() - expected).norm() / expected.norm()
        print(f"{name}: {error:.1e}", end=" ")
        assert error < PRODUCT
