"""Emulated formats train the quickstart's model in every layout nearly as fp32 does; and not by computing in fp32."""

import pytest

from . import engines
from .harness import RunRanks

pytestmark = pytest.mark.slow

NEAR = 0.02
"""Relative distance of losses: what the quickstart is held to."""
FP4_NEAR = 0.06
"""Four bits learn more slowly: 4.5% were seen after 20 steps."""
STEPS, BATCHES = 20, 3
"""Three batches, again and again: a model of this size learns them by heart."""
RECIPES = ["precision.dtype=fp32", "precision.backend=emulated"]
LAYOUTS = {
    "TP2 with SP": ["parallel.tp=2", "parallel.sp=true"],
    "CP2": ["parallel.cp=2"],
    "PP2": ["parallel.pp=2"],
    "DP2": [],
    "EP2": ["model=tiny_mixtral", "model.num_layers=2", "parallel.ep=2"],
}


def losses(rank: int, world: int, store: str, overrides: list[str]) -> list[float]:
    model = [] if any(each.startswith("model=") for each in overrides) else ["model=tiny", "model.num_layers=2"]
    engine = engines.engine_of(engines.family_config([*model, *overrides], world), rank, store)
    steps = [engines.share(engine, engines.random_step(number)) for number in range(BATCHES)]
    return [engine.train_step(steps[number % BATCHES], lr=3e-4, weight_decay=0.1).loss for number in range(STEPS)]


CASES = [(layout, "fp8_delayed") for layout in LAYOUTS] + [("TP2 with SP", "mxfp8"), ("TP2 with SP", "nvfp4")]


@pytest.mark.parametrize(("layout", "recipe"), CASES)
def test_losses_stay_near_those_of_fp32(run_ranks: RunRanks, layout: str, recipe: str) -> None:
    plain = run_ranks(losses, 2, ["precision=fp32", *LAYOUTS[layout]])[0]
    narrow = run_ranks(losses, 2, [f"precision={recipe}", *RECIPES, *LAYOUTS[layout]])[0]
    print(f"{layout} {recipe}: {plain[0]:.4f} to {plain[-1]:.4f}, {narrow[0]:.4f} to {narrow[-1]:.4f}")
    assert plain[-1] < plain[0] - 0.5, "nothing was learnt"
    assert narrow != plain
    for number, (loss, expected) in enumerate(zip(narrow, plain, strict=True)):
        assert loss == pytest.approx(expected, rel=FP4_NEAR if recipe == "nvfp4" else NEAR), number
