"""One checkpoint, ten steps, every layout: the same losses, gradients and weights."""

from pathlib import Path

import pytest
import torch

from shardwright.parallel.mcore import shards

from . import engines
from .harness import RunRanks

NUM_STEPS = 10
RELATIVE = 1e-5
"""fp32 sums in another order differ by some 1e-7 per step; Adam's division by small roots carries that to about 1e-6
per tensor in ten steps. Per element it is more where a gradient is near zero, so tensors are compared in norm."""

LAYOUTS = {
    "data parallel": (2, []),
    "data parallel without overlap": (
        2,
        ["parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"],
    ),
    "tensor parallel": (2, ["parallel.tp=2"]),
    "tensor and sequence parallel": (2, ["parallel.tp=2", "parallel.sp=true"]),
    "pipeline parallel": (2, ["parallel.pp=2"]),
    "tensor, sequence and pipeline parallel": (4, ["parallel.tp=2", "parallel.sp=true", "parallel.pp=2"]),
    "interleaved stages": (2, ["parallel.pp=2", "parallel.vpp=2"]),
    "interleaved stages without overlap": (
        2,
        [
            "parallel.pp=2",
            "parallel.vpp=2",
            "parallel.overlap_grad_reduce=false",
            "parallel.overlap_param_gather=false",
        ],
    ),
    "interleaved stages, the embedding and the loss alone": (
        2,
        ["parallel.pp=2", "parallel.vpp=2", "parallel.pipeline_layout=E|tt|tt|L"],
    ),
    "a short first stage": (2, ["parallel.pp=2", "parallel.num_layers_in_first_pipeline_stage=1"]),
    "a last stage of the loss alone": (2, ["parallel.pp=2", "parallel.pipeline_layout=Et*4|L"]),
    "stages that count the embedding and the loss": (
        3,
        [
            "parallel.pp=3",
            "parallel.account_for_embedding_in_pipeline_split=true",
            "parallel.account_for_loss_in_pipeline_split=true",
        ],
    ),
    "context parallel": (2, ["parallel.cp=2"]),
    "context, tensor and sequence parallel": (4, ["parallel.cp=2", "parallel.tp=2", "parallel.sp=true"]),
    "context parallel and interleaved stages": (4, ["parallel.cp=2", "parallel.pp=2", "parallel.vpp=2"]),
    "data parallel and interleaved stages": (4, ["parallel.pp=2", "parallel.vpp=2"]),
}
DEEP = ["model.num_layers=4"]
"""Enough layers for two stages of two chunks."""


def start_from_scratch(rank: int, world: int, store: str, folder: Path) -> None:
    engine = engines.engine_of(engines.config_of(DEEP, world), rank, store)
    engines.save(engine, folder)


def train_from(
    rank: int, world: int, store: str, overrides: list[str], start: Path, results: Path
) -> tuple[list[tuple[float, float | None]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and norms, and all tensors after the first and after the last step."""
    engine = engines.engine_of(engines.config_of([*DEEP, *overrides], world), rank, store)
    shards.load(engine, start, with_rng=False)
    curve = engines.train(engine, 1)
    engines.save(engine, results / "first")
    curve += engines.train(engine, NUM_STEPS - 1, first_seed=1)
    engines.save(engine, results / "last")
    if rank:
        return curve, {}, {}
    return curve, engines.full_tensors(results / "first"), engines.full_tensors(results / "last")


@pytest.fixture(scope="module")
def start(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "checkpoint"
    run_ranks(start_from_scratch, 1, folder)
    return folder


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks, start: Path, tmp_path_factory: pytest.TempPathFactory):
    return run_ranks(train_from, 1, [], start, tmp_path_factory.mktemp("alone"))[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_like_one_rank(run_ranks: RunRanks, start: Path, alone, tmp_path: Path, name: str) -> None:
    world, overrides = LAYOUTS[name]
    results = run_ranks(train_from, world, overrides, start, tmp_path)
    expected_curve, *expected_states = alone
    for curve, *_ in results:
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected_curve), rtol=RELATIVE, atol=0)
    for state, expected in zip(results[0][1:], expected_states, strict=True):
        assert state.keys() == expected.keys()
        far = {
            key: float((state[key] - tensor).norm() / tensor.norm())
            for key, tensor in expected.items()
            if (state[key] - tensor).norm() > RELATIVE * tensor.norm()
        }
        assert not far, f"tensors that differ, relative in norm: {far}"


def test_training_moves_every_tensor(alone) -> None:
    _, first, last = alone
    still = [name for name, tensor in first.items() if torch.equal(tensor, last[name])]
    assert not still
    gradients = {name: tensor for name, tensor in first.items() if ".exp_avg." in name}
    assert gradients and all(tensor.abs().max() > 0 for tensor in gradients.values())
