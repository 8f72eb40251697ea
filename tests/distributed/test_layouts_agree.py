"""One checkpoint, ten steps, every layout: the same losses, gradients and weights."""

from pathlib import Path

import pytest
import torch

from .agreement import Run, assert_agree, start_from_scratch, train_from
from .engines import TINY
from .harness import RunRanks
from .tail import long_tail

NUM_STEPS = 10
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
DEEP = [*TINY, "model.num_layers=4"]
"""Enough layers for two stages of two chunks."""
QUICK = ("data parallel", "tensor and sequence parallel", "interleaved stages", "context parallel")
"""One of each kind."""


@pytest.fixture(scope="module")
def start(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "checkpoint"
    run_ranks(start_from_scratch, 1, DEEP, folder)
    return folder


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks, start: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run: Run = run_ranks(train_from, 1, DEEP, NUM_STEPS, start, tmp_path_factory.mktemp("alone"))[0]
    return run


@pytest.mark.parametrize("name", long_tail(LAYOUTS, quick=QUICK))
def test_a_layout_trains_like_one_rank(run_ranks: RunRanks, start: Path, alone: Run, tmp_path: Path, name: str) -> None:
    world, overrides = LAYOUTS[name]
    assert_agree(run_ranks(train_from, world, [*DEEP, *overrides], NUM_STEPS, start, tmp_path), alone)


def test_training_moves_every_tensor(alone: Run) -> None:
    _, first, last = alone
    still = [name for name, tensor in first.items() if torch.equal(tensor, last[name])]
    assert not still
    gradients = {name: tensor for name, tensor in first.items() if ".exp_avg." in name}
    assert gradients and all(tensor.abs().max() > 0 for tensor in gradients.values())
