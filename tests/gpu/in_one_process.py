"""Speeds of many configurations in one process on one GPU: ratios within minutes, where `bench step` takes an hour.

    python -m tests.gpu.in_one_process RESULTS.json PART...

Parts: `levers`, single choices of how a step is computed against the default before and after them; `models`, other
families in BF16 and FP8; `watch`, what samples, self-check and guard of FP8 cost. Every case builds an engine, makes
two steps, and times the next ones; of the loop around a step nothing is in it. Some memory of an engine stays behind,
so peaks here are not those of a run.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwright.conf.compose import compose

from .one_rank import OneRank, step_of

if TYPE_CHECKING:
    from shardwright.parallel.mcore.engine import Engine

WARMUP, STEPS = 2, 5
SHAPES_8B = ("experiment=bench_8b_16l", "model.num_layers=8", "precision=fp8_delayed")
LEVERS = (
    "",
    "execution.bias_activation_fusion=false",
    "execution.apply_rope_fusion=false",
    "execution.cross_entropy=native",
    "execution.cross_entropy=unfused",
    "model.recompute_granularity=selective model.recompute_modules=[core_attn]",
    "",
)
MIXTRAL = ("experiment=bench_moe", "model.num_layers=8", "model.num_moe_experts=8")
WIDE = ("model.moe_ffn_hidden_size=7168", "model.ffn_hidden_size=7168")
QWEN = ("model=qwen3_1_7b", "data=mock", "data.seq_length=4096", "data.micro_batch_size=2", "data.global_batch_size=8")
MODELS = {
    "Llama 3.2 1B": ("experiment=bench_llama32_1b",),
    "Qwen3 1.7B": (*QWEN, "cluster.ranks=1"),
    "Mixtral, 8 layers": (*MIXTRAL, *WIDE),
    "MoE of the bench": ("experiment=bench_moe",),
}


class Timer:
    """Times cases one after another, and writes each down at once."""

    def __init__(self, results: Path) -> None:
        self._rank, self._results, self.rows = OneRank("cuda"), results, list[dict[str, Any]]()

    def case(self, name: str, *overrides: str, act: Callable[["Engine", list[float]], None] | None = None) -> None:
        """Build an engine, time its steps, print a row.

        Args:
            name: of the case.
            overrides: of the run.
            act: called with the engine and the seconds of its steps at the end; may time more.
        """
        config = compose([*overrides, "cluster.gpu=auto"])
        refusals = self._rank.refusals(config)
        if refusals:
            print(f"| {name} | refused: {refusals[0]} |", flush=True)
            return
        torch.cuda.reset_peak_memory_stats()
        engine = self._rank.engine_of(config)
        losses, seconds = [], []
        for number in range(WARMUP + STEPS):
            took, loss = timed_step(engine, number)
            seconds.append(took)
            losses.append(loss)
        median = statistics.median(seconds[WARMUP:])
        tokens = config.data.global_batch_size * config.data.seq_length
        self.rows.append({"name": name, "overrides": overrides, "losses": losses, "seconds": seconds})
        self._results.write_text(json.dumps(self.rows))
        first, last, peak = losses[0], losses[-1], torch.cuda.max_memory_allocated() / 2**30
        print(f"| {name} | {tokens / median:,.0f} tok/s | {first:.3f} to {last:.3f} | {peak:.1f} GiB |", flush=True)
        if act is not None:
            act(engine, seconds[WARMUP:])
        del engine
        self._rank.forget()


def timed_step(engine: "Engine", number: int) -> tuple[float, float]:
    """Seconds and loss of one step."""
    batches = step_of(engine.config, number)
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = engine.train_step(batches, 1e-4, 0.1)
    torch.cuda.synchronize()
    return time.perf_counter() - began, result.loss


def watched(engine: "Engine", seconds: list[float]) -> None:
    """What one sample and one self-check take, in shares of a step."""
    from shardwright.parallel.mcore.fp8_samples import Samples

    usual = statistics.median(seconds)
    samples = Samples(engine.narrow, engine.config.precision, engine.layout, 0, engine.control_group)
    sampled = []
    for number in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        samples.begin()
        engine.train_step(step_of(engine.config, number), 1e-4, 0.1)
        measured = samples.end()
        sampled.append(time.perf_counter() - began)
    began = time.perf_counter()
    engine.narrow.differences()
    check = time.perf_counter() - began
    extra, operands = statistics.median(sampled) - usual, len(measured or ())
    print(
        f"  a step {1000 * usual:.0f} ms; a sample of {operands} operands {1000 * extra:.0f} ms more "
        f"({extra / usual:.2f} steps); a self-check {1000 * check:.1f} ms ({check / usual:.3f} steps)",
        flush=True,
    )
    gc.collect()


def main(results: Path, parts: list[str]) -> None:
    timer = Timer(results)
    for part in parts:
        match part:
            case "levers":
                for lever in LEVERS:
                    timer.case(lever or "default", *SHAPES_8B, *lever.split())
            case "models":
                for name, overrides in MODELS.items():
                    for precision in ("bf16", "fp8_delayed"):
                        timer.case(f"{name}, {precision}", *overrides, f"precision={precision}")
            case "watch":
                for number in range(2):
                    timer.case(f"fp8_delayed {number}", *SHAPES_8B, act=watched)
                    timer.case(f"fp8_delayed with the guard {number}", *SHAPES_8B, "resilience.fp8_guard=true")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
