"""Narrow formats and scaling recipes: every code, every edge, and what the recipes promise."""

import math

import pytest
import torch

from shardwright.parallel.fp8 import quantize
from shardwright.parallel.fp8.formats import (
    E2M1,
    E4M3,
    E5M2,
    FP32_MAX,
    Format,
    Infinity,
    decode,
    decode_e8m0,
    encode,
    encode_by_chance,
    encode_e8m0,
    reciprocal_of_e8m0,
)
from shardwright.parallel.fp8.linear import BlockScaling, CurrentScaling, Mxfp8, Nvfp4, Recipe, linear

FORMATS = [E4M3, E5M2, E2M1]
NUM_CODES = {E4M3: 256, E5M2: 256, E2M1: 16}


def codes_of(format: Format) -> torch.Tensor:
    return torch.arange(NUM_CODES[format], dtype=torch.int32).to(torch.uint8)


def finite_numbers(format: Format) -> torch.Tensor:
    numbers = decode(codes_of(format), format)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_finite_code_survives_the_way_to_a_number_and_back(format: Format) -> None:
    codes = codes_of(format)
    numbers = decode(codes, format)
    kept = numbers.isfinite()
    assert torch.equal(encode(numbers[kept], format), codes[kept])
    assert numbers[kept].abs().max() == format.max


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_number_becomes_the_nearest_one_and_halfway_the_even_code(format: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    known = finite_numbers(format).unique()  # ascending
    halfway = (known[1:] + known[:-1]) / 2
    exponents = torch.empty(4000).uniform_(-14, 9, generator=generator)
    random = torch.randn(4000, generator=generator).sign() * exponents.exp2()
    for number in torch.cat([random, halfway]).clamp(-format.max, format.max).tolist():
        code = encode(torch.tensor([number]), format)
        distance = (known.double() - number).abs()
        near = known[distance == distance.min()]
        result = decode(code, format).item()
        assert result in near.tolist(), number
        if len(near) == 2:  # zero has two codes, both even in their last bit but for the sign
            assert code.item() % 2 == 0, number


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_beyond_the_largest_number_a_format_saturates(format: Format) -> None:
    beyond = torch.tensor([format.max * 1.04, -format.max * 1.5, 1e30, -1e30, math.inf, -math.inf])
    assert decode(encode(beyond, format), format).tolist() == [format.max, -format.max] * 3


def test_torch_s_plain_cast_would_make_nan_of_what_saturates() -> None:
    assert torch.tensor([465.0]).to(torch.float8_e4m3fn).float().isnan()
    assert decode(encode(torch.tensor([465.0]), E4M3), E4M3).item() == 448


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
def test_nan_stays_nan_and_infinity_follows_the_policy(format: Format) -> None:
    numbers = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    saturated = decode(encode(numbers, format), format)
    assert saturated[0].isnan() and saturated[1:].tolist() == [format.max, -format.max, 1.0]
    seen = decode(encode(numbers, format, Infinity.nan), format)
    assert seen[:3].isnan().all() and seen[3] == 1.0


def test_an_exponent_byte_is_the_least_power_of_two_that_is_not_below() -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.empty(10_000).uniform_(-120, 120, generator=generator).exp2()
    powers = decode_e8m0(encode_e8m0(numbers))
    assert (powers >= numbers).all() and (powers / 2 < numbers).all()
    exact = torch.tensor([1.0, 0.5, 2.0**100, 2.0**-126])
    assert torch.equal(decode_e8m0(encode_e8m0(exact)), exact)
    edges = encode_e8m0(torch.tensor([0.0, math.inf, math.nan, FP32_MAX]))
    assert edges.tolist() == [0, 254, 255, 254]
    codes = torch.arange(1, 253, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(reciprocal_of_e8m0(codes) * decode_e8m0(codes), torch.ones(252))


def test_a_delayed_scale_brings_amax_to_the_largest_number_below_the_margin() -> None:
    amax, former = torch.tensor([8.0, 2.0]), torch.tensor([1.0, 1.0])
    assert quantize.delayed_scale(amax, former, E4M3, margin=0).tolist() == [56.0, 224.0]
    assert quantize.delayed_scale(amax, former, E4M3, margin=1).tolist() == [28.0, 112.0]


def test_a_delayed_scale_stays_where_amax_says_nothing() -> None:
    amax, former = torch.tensor([0.0, math.inf, math.nan, 1e-45]), torch.full((4,), 224.0)
    assert quantize.delayed_scale(amax, former, E4M3, margin=0).tolist() == [224.0, 224.0, 224.0, FP32_MAX]


def test_a_current_scale_is_one_where_amax_says_nothing() -> None:
    amax = torch.tensor([0.0, math.inf, math.nan, 448.0, 3.0])
    assert quantize.current_scale(amax, E4M3).tolist()[:4] == [1.0, 1.0, 1.0, 1.0]
    assert quantize.current_scale(amax, E4M3, power_of_two=True)[4] == 128.0, "448 / 3 = 149 rounded down"


def heavy_tailed(rows: int, columns: int) -> torch.Tensor:
    """Random numbers with a few a hundred thousand times as large."""
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix[torch.rand(rows, columns, generator=generator) < 1e-3] *= 1e5
    return matrix


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((result - wanted).norm() / wanted.norm())


def test_a_quantised_matrix_is_within_half_a_step_of_its_format() -> None:
    matrix = torch.randn(70, 200, generator=torch.Generator().manual_seed(3))
    quantised = [
        quantize.by_tensor(matrix, E4M3, quantize.current_scale(quantize.amax_of(matrix), E4M3)),
        quantize.by_blocks(matrix, E4M3, (1, 128)),
        quantize.by_blocks(matrix, E4M3, (128, 128)),
        quantize.mxfp8(matrix),
    ]
    for each in quantised:
        assert each.codes.shape == matrix.shape and each.codes.dtype == torch.uint8
        worst = ((each.dequantize() - matrix).abs() / matrix.abs().clamp(min=1e-2)).max()
        assert worst <= 2**-4 * (1 + 1e-6), "E4M3 has three bits of mantissa"
    assert relative_error(quantize.nvfp4(matrix).dequantize(), matrix) < 0.12


def test_small_blocks_save_what_outliers_cost_a_whole_tensor() -> None:
    matrix = heavy_tailed(256, 512)
    usual = matrix.abs() < 10
    scale = quantize.current_scale(quantize.amax_of(matrix), E4M3)
    by_tensor, mxfp8 = quantize.by_tensor(matrix, E4M3, scale), quantize.mxfp8(matrix)
    errors = [relative_error(each.dequantize()[usual], matrix[usual]) for each in (by_tensor, mxfp8)]
    assert errors[1] < 0.8 * errors[0]


def test_the_transpose_of_a_square_block_has_its_codes() -> None:
    matrix = heavy_tailed(256, 384)
    one, other = (quantize.by_blocks(each, E4M3, (128, 128)) for each in (matrix, matrix.T.contiguous()))
    assert torch.equal(one.codes, other.codes.T) and torch.equal(one.scale_inv, other.scale_inv.T)


def test_rounding_by_chance_takes_a_neighbour_and_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(7)
    for number in (0.1, -0.8, 2.0, 5.5, -7.0):
        numbers = torch.full((20_000,), number)
        rounded = decode(encode_by_chance(numbers, torch.rand(20_000, generator=generator)), E2M1)
        assert len(rounded.unique()) <= 2
        assert rounded.mean().item() == pytest.approx(max(number, -E2M1.max), abs=0.02)


def test_the_hadamard_transform_leaves_a_product_as_it_is_and_spreads_an_outlier() -> None:
    generator = torch.Generator().manual_seed(8)
    left, right = (torch.randn(rows, 40, generator=generator) for rows in (5, 7))
    product = quantize.hadamard(left) @ quantize.hadamard(right).T
    assert torch.allclose(product, left @ right.T, atol=1e-5)
    outlier = torch.zeros(1, 16)
    outlier[0, 3] = 8.0
    assert torch.equal(quantize.hadamard(outlier).abs(), torch.full((1, 16), 2.0))


RECIPES: dict[str, tuple[Recipe, float]] = {
    "current": (CurrentScaling(E4M3, E5M2), 0.1),
    "blocks": (BlockScaling(), 0.05),
    "mxfp8": (Mxfp8(), 0.05),
    "nvfp4": (Nvfp4(), 0.25),
    "nvfp4, transformed": (Nvfp4(hadamard=True), 0.25),
    "nvfp4, transformed and by chance": (Nvfp4(hadamard=True, by_chance=True), 0.3),
}
"""Recipe -> relative error of a product of random matrices that its format allows."""


@pytest.mark.parametrize("name", RECIPES)
def test_all_three_products_have_narrow_operands(name: str) -> None:
    recipe, allowed = RECIPES[name]
    generator = torch.Generator().manual_seed(4)
    x, w, dy = (torch.randn(*shape, generator=generator) for shape in ((3, 50, 160), (96, 160), (3, 50, 96)))
    x.requires_grad_(), w.requires_grad_()
    y = linear(x, w, recipe)
    y.backward(dy)
    assert x.grad is not None and w.grad is not None
    wanted = (x @ w.T, dy @ w, torch.einsum("bsn,bsk->nk", dy, x))
    for result, exact in zip((y, x.grad, w.grad), wanted, strict=True):
        error = relative_error(result.detach(), exact.detach())
        assert 1e-4 < error < allowed
