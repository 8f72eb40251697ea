"""Training in a layout against training on one rank: both from one checkpoint, then their tensors are compared."""

from pathlib import Path

import torch

from shardwright.parallel.mcore import shards

from . import engines

RELATIVE = 1e-5
"""fp32 sums in another order differ by some 1e-7 per step; Adam's division by small roots carries that to about 1e-6
per tensor in ten steps. Per element it is more where a gradient is near zero, so tensors are compared in norm."""

ABSOLUTE = 1e-7
"""Where one rank's tensor is zero."""

type Curve = list[tuple[float, float | None]]
"""Loss and gradient norm of each step."""
type Tensors = dict[str, torch.Tensor]
type Run = tuple[Curve, Tensors, Tensors]
"""Losses and norms, and all tensors after the first and after the last step (on rank 0, else none)."""


def start_from_scratch(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> None:
    """Save a new model and optimizer."""
    engines.save(engines.engine_of(engines.family_config(overrides, world), rank, store), folder)


def train_from(
    rank: int, world: int, store: str, overrides: list[str], num_steps: int, start: Path, results: Path
) -> Run:
    """Train some steps from a checkpoint of any layout."""
    engine = engines.engine_of(engines.family_config(overrides, world), rank, store)
    shards.load(engine, start, with_rng=False)
    curve = engines.train(engine, 1)
    engines.save(engine, results / "first")
    curve += engines.train(engine, num_steps - 1, first_seed=1)
    engines.save(engine, results / "last")
    if rank:
        return curve, {}, {}
    return curve, engines.full_tensors(results / "first"), engines.full_tensors(results / "last")


def assert_agree(results: list[Run], alone: Run) -> None:
    """All ranks' losses and norms, and every tensor in norm, are those of one rank."""
    expected_curve, *expected_states = alone
    for curve, *_ in results:
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected_curve), rtol=RELATIVE, atol=0)
    for state, expected in zip(results[0][1:], expected_states, strict=True):
        assert state.keys() == expected.keys()
        far = {
            key: float((state[key] - tensor).norm() / tensor.norm())
            for key, tensor in expected.items()
            if not (state[key] - tensor).norm() <= (RELATIVE * tensor.norm() if tensor.any() else ABSOLUTE)
        }
        assert not far, f"tensors that differ, relative in norm: {far}"
