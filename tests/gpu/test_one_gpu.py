"""The same `train` on one GPU, with Transformer Engine, in BF16 and FP8: losses fall, and a stopped run goes on.

Slow: `pytest tests/gpu -m gpu -s` prints a table of what was seen.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

TINY = ["model=tiny", "data.seq_length=256", "data.micro_batch_size=8", "data.global_batch_size=32"]
LLAMA_1B = [
    "model=llama3_1b",
    "data.vocab_size=2048",
    "data.seq_length=2048",
    "data.micro_batch_size=2",
    "data.global_batch_size=4",
    "optimizer.lr=3e-4",
]
MODELS = {"tiny": TINY, "1B": LLAMA_1B}
COMMON = [
    "cluster.gpu=auto",
    "schedule.lr_warmup_iters=2",
    "schedule.lr_decay_iters=30",
    "schedule.eval_interval=10",
    "checkpoint.keep_last=1",
    "checkpoint.save_interval=0",
    "data.num_workers=2",
]


def train(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run the command; returns the rows of metrics.jsonl."""
    command = [sys.executable, "-P", "-m", "shardwright.pretrain", "train", f"run.dir={folder}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def start_event(folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return next(row["data"] for row in rows if row["kind"] == "start")


@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_fall_and_a_run_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, precision: str
) -> None:
    overrides = [*COMMON, *MODELS[model], f"precision={precision}", f"data.cache_dir={tmp_path.parent / 'cache'}"]
    first = train(tmp_path / "run", *overrides, "schedule.train_iters=20")
    whole = train(tmp_path / "run", "schedule.train_iters=25")
    assert [row["step"] for row in whole] == list(range(1, 26))
    assert whole[:20] == first
    assert whole[-1]["loss"] < whole[0]["loss"] - 1.0
    assert whole[20]["loss"] < first[0]["loss"] - 1.0, "the first loss after the resume is that of a trained model"
    started = start_event(tmp_path / "run")
    assert "Transformer Engine" in started["kernels"]["layers"]
    last = sorted(row["step_seconds"] for row in first[5:])
    with capsys.disabled():
        print(
            f"\n{model:>5} {precision:<12} loss {first[0]['loss']:.3f} -> {first[-1]['loss']:.3f}, resumed "
            f"{whole[20]['loss']:.3f} -> {whole[-1]['loss']:.3f}; step {1000 * last[len(last) // 2]:.0f} ms, "
            f"{first[-1]['tokens_per_second']:.0f} tok/s, {first[-1]['tflops']:.0f} TFLOP/s, mfu {first[-1]['mfu']}, "
            f"peak {first[-1]['memory_bytes'] / 2**30:.1f} GiB; {started['kernels']}",
            end=" ",
        )


def test_fp8_changes_the_arithmetic(tmp_path: Path) -> None:
    """The same run in BF16 and in FP8 differs from the first loss on: FP8 was really used."""
    losses = {}
    for precision in ("bf16", "fp8_delayed"):
        overrides = [*COMMON, *TINY, f"precision={precision}", f"data.cache_dir={tmp_path.parent / 'cache'}"]
        losses[precision] = train(tmp_path / precision, *overrides, "schedule.train_iters=3")[0]["loss"]
    assert losses["bf16"] != losses["fp8_delayed"]
    assert losses["bf16"] == pytest.approx(losses["fp8_delayed"], abs=0.05)
