"""In the layout that wrote it a checkpoint goes on bit for bit: losses, norms, weights, moments, random numbers."""

from pathlib import Path

import pytest
import torch

from shardwright.parallel.mcore import shards

from . import engines
from .agreement import Curve
from .engines import TINY
from .harness import RunRanks
from .tail import long_tail

BEFORE, AFTER = 3, 3
DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
PARALLEL = ["parallel.tp=2", "parallel.sp=true"]
MIXTRAL = ["model=tiny_mixtral", "model.vocab_size=500", "model.hidden_dropout=0.1"]
BUCKETS = "checkpoint.optimizer_format=dp_reshardable"
CASES = {
    "fp32, dropout": [*TINY, *DROPOUT],
    "fp32, dropout, tensor and sequence parallel": [*TINY, *DROPOUT, *PARALLEL],
    "fp32, dropout, interleaved stages": [
        *(*TINY, *DROPOUT, "model.num_layers=4"),
        *("parallel.pp=2", "parallel.vpp=2"),
    ],
    "fp32, context parallel": [*TINY, "parallel.cp=2"],
    "bf16, dropout": [*TINY, *DROPOUT, "precision=bf16"],
    "bf16, tensor and sequence parallel": [*TINY, *PARALLEL, "precision=bf16"],
    "fp16, dropout": [*TINY, *DROPOUT, "precision=fp16"],
    "fp8 delayed, emulated": [*TINY, *DROPOUT, *PARALLEL, "precision=fp8_delayed", "precision.backend=emulated"],
    "fp8 current, emulated": [*TINY, *DROPOUT, "precision=fp8_current", "precision.backend=emulated"],
    "buckets as they lie in memory": [*TINY, *DROPOUT, BUCKETS],
    "buckets in bf16, experts over ranks": [*MIXTRAL, "parallel.ep=2", "precision=bf16", BUCKETS],
    "buckets in bf16, interleaved stages": [
        *(*TINY, "model.num_layers=4", "precision=bf16"),
        *("parallel.pp=2", "parallel.vpp=2", BUCKETS),
    ],
    "experts over ranks": [*MIXTRAL, "parallel.ep=2"],
    "experts, tensor parallel": [*MIXTRAL, *PARALLEL, "parallel.ep=2", "parallel.etp=1"],
    "experts with biases, latent attention, multi-token prediction": ["model=tiny_deepseek", "parallel.ep=2"],
}
QUICK = ("fp8 delayed, emulated",)
"""Dropout in fp32 goes on bit for bit in `test_kill_and_resume.py` too."""


def train(rank: int, world: int, store: str, overrides: list[str], start: Path, results: Path) -> Curve:
    """Save after some steps, or load what was saved; then train on."""
    engine = engines.engine_of(engines.family_config(overrides, world), rank, store)
    if start.exists():
        torch.rand(5)  # a generator that stands elsewhere
        shards.load(engine, start, with_rng=True)
    else:
        engines.train(engine, BEFORE)
        engines.save(engine, start)
    curve = engines.train(engine, AFTER, first_seed=BEFORE)
    engines.save(engine, results)
    return curve


def differing(rank: int, world: int, store: str, one: Path, other: Path) -> list[str]:
    """Names of tensors, of weights and optimizer, that are not equal bit for bit."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    first, second = engines.full_tensors(one), engines.full_tensors(other)
    assert first.keys() == second.keys() and len(first) > 10
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


@pytest.mark.parametrize("name", long_tail(CASES, quick=QUICK))
def test_a_resume_changes_no_bit(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    start = tmp_path / "start"
    straight = run_ranks(train, 2, CASES[name], start, tmp_path / "straight")
    resumed = run_ranks(train, 2, CASES[name], start, tmp_path / "resumed")
    assert resumed == straight
    assert run_ranks(differing, 1, tmp_path / "straight", tmp_path / "resumed") == [[]]
