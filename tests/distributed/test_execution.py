"""How a step is computed changes nothing of what it computes."""

import pytest
import torch

from . import engines
from .harness import RunRanks
from .tail import long_tail

type Curve = list[tuple[float, float | None]]
"""Loss and gradient norm of each step."""

SAME = 1e-6
"""Relative: fp32 sums in another order."""
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "TP2 with SP": (2, ["parallel.tp=2", "parallel.sp=true"]),
    "CP2": (2, ["parallel.cp=2"]),
    "CP2 and TP2 with SP": (4, ["parallel.cp=2", "parallel.tp=2", "parallel.sp=true"]),
}


def curve(rank: int, world: int, store: str, overrides: list[str]) -> Curve:
    return engines.train(engines.engine_of(engines.config_of(overrides, world), rank, store), num_steps=3)


@pytest.mark.parametrize("name", long_tail(LAYOUTS, quick=["one rank", "TP2 with SP"]))
def test_a_loss_in_chunks_is_the_loss_at_once(run_ranks: RunRanks, name: str) -> None:
    world, layout = LAYOUTS[name]
    whole = run_ranks(curve, world, layout)[0]
    chunked = run_ranks(curve, world, [*layout, "execution.cross_entropy_chunks=4"])[0]
    for (loss, norm), (loss_whole, norm_whole) in zip(chunked, whole, strict=True):
        assert loss == pytest.approx(loss_whole, rel=SAME)
        assert norm == pytest.approx(norm_whole, rel=SAME)


def largest_logits(rank: int, world: int, store: str, num_chunks: int) -> int:
    """The most tokens whose logits were seen at once in a step."""
    config = engines.config_of([f"execution.cross_entropy_chunks={num_chunks}"], world)
    engine = engines.engine_of(config, rank, store)
    seen: list[int] = []
    gpt = engine.model.module
    gpt.output_layer.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[0].shape[0]))
    engines.train(engine, num_steps=1)
    return max(seen)


def test_chunks_keep_most_logits_from_existing(run_ranks: RunRanks) -> None:
    assert run_ranks(largest_logits, 1, 1) == [engines.SEQ_LENGTH]
    assert run_ranks(largest_logits, 1, 8) == [engines.SEQ_LENGTH // 8]


def deterministic(rank: int, world: int, store: str) -> tuple[Curve, bool]:
    from shardwright.parallel.mcore import environment

    environment.prepare("cpu", deterministic=True)
    config = engines.config_of(["execution=deterministic"], world)
    engine = engines.engine_of(config, rank, store)
    return engines.train(engine, num_steps=3), torch.are_deterministic_algorithms_enabled()


def test_a_deterministic_run_refuses_kernels_that_are_not_and_changes_nothing_else(run_ranks: RunRanks) -> None:
    seen, enabled = run_ranks(deterministic, 1)[0]
    assert enabled
    for (loss, norm), (loss_usual, norm_usual) in zip(seen, run_ranks(curve, 1, [])[0], strict=True):
        assert loss == pytest.approx(loss_usual, rel=SAME)
        assert norm == pytest.approx(norm_usual, rel=SAME)
