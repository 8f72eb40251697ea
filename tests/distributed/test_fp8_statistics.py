"""The numbers of a quantised operand, against cases that can be counted by hand; no ranks."""

import math

import pytest
import torch

from shardwright.parallel.fp8 import quantize, statistics
from shardwright.parallel.fp8.formats import E4M3
from shardwright.parallel.fp8.linear import BlockScaling, CurrentScaling, Mxfp8, Nvfp4, Recipe
from shardwright.parallel.fp8.statistics import FIRST_EXPONENT, Numbers, measure


def with_scale(scale: float) -> object:
    return lambda rows, amax: quantize.by_tensor(rows, E4M3, torch.tensor(scale))


def test_what_vanishes_and_what_saturates_is_counted() -> None:
    # E4M3: the least number is 2^-9, half of it rounds to 0; the largest is 448
    matrix = torch.tensor([[0.0, 2.0**-11, -(2.0**-11), 2.0**-9, 1.0, 448.0, 449.0, -1e6]])
    found = Numbers.of(measure(matrix, with_scale(1.0)).tolist())  # type: ignore[arg-type]
    assert (found.underflow, found.overflow, found.elements, found.amax) == (2, 2, 8, 1e6)
    assert found.underflow_share == 0.25 and found.non_finite == 0
    assert found.noise == pytest.approx(2 * 2.0**-22 + 1 + (1e6 - 448) ** 2)
    assert sum(found.histogram) == 7 and found.histogram[1 - FIRST_EXPONENT] == 1  # 1.0 is 0.5 * 2^1


def test_what_is_not_finite_is_counted_and_spoils_nothing() -> None:
    matrix = torch.tensor([[math.nan, math.inf, 1.0, 2.0]])
    found = Numbers.of(measure(matrix, with_scale(1.0)).tolist())  # type: ignore[arg-type]
    assert found.non_finite == 2 and found.signal == 5.0 and found.noise == 0.0 and found.sqnr_db is None
    assert math.isnan(found.amax)


def test_parts_of_two_ranks_add_up() -> None:
    whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    parts = [Numbers.of(measure(part, with_scale(100.0)).tolist()) for part in whole.split(16)]  # type: ignore[arg-type]
    together = parts[0] + parts[1] + parts[2] + parts[3]
    alone = Numbers.of(measure(whole, with_scale(100.0)).tolist())  # type: ignore[arg-type]
    assert together.histogram == alone.histogram and together.amax == alone.amax
    assert together.sqnr_db == pytest.approx(alone.sqnr_db)


def test_a_large_matrix_is_judged_by_bands_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.zeros(1024, 64)
    matrix[1000, 3] = 7.0
    monkeypatch.setattr(statistics, "MOST_ELEMENTS", 256 * 64)
    found = Numbers.of(measure(matrix, with_scale(1.0)).tolist())  # type: ignore[arg-type]
    assert found.elements == 256 * 64 and found.amax == 7.0


RECIPES: dict[str, tuple[Recipe, float, float]] = {
    "current": (CurrentScaling(E4M3, E4M3), 29, 33),
    "blockwise": (BlockScaling(), 29, 33),
    "mxfp8": (Mxfp8(), 29, 33),
    "nvfp4": (Nvfp4(), 18, 24),
}
"""Recipe, and between how many decibel it leaves of normal numbers: three bits of mantissa, and one."""


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_its_signal_to_noise_ratio(name: str) -> None:
    recipe, least, most = RECIPES[name]
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(2))
    for operand in ("x", "w", "dy"):

        def quantized(rows: torch.Tensor, amax: torch.Tensor, operand: str = operand) -> quantize.Quantized:
            return recipe.quantized(operand, rows, amax)

        found = Numbers.of(measure(matrix, quantized).tolist())
        assert found.sqnr_db is not None and least < found.sqnr_db < most, (name, operand, found.sqnr_db)
        assert found.overflow <= (0 if name != "nvfp4" else found.elements)
