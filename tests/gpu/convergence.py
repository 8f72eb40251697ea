"""BF16 and every recipe of Hopper over 300 steps of real text, three seeds each, compared pair by pair.

    python -m tests.gpu.convergence RESULTS.json [RECIPE...]

One GPU, which a process for each precision shares, and a GPT-3 of the 125M shape, too small to keep the GPU busy alone,
over the sources of Python. A seed decides initial weights, dropout and the order of the samples, so two runs of one
seed differ by their number format alone. What is compared is the loss over the same validation samples after the last
step, and the mean training loss of the last twenty steps. A recipe passes if its mean paired difference to BF16 is not
larger than the standard deviation that seeds alone cause in BF16.

All of it in deterministic mode, so that the first recipe's last run, saved half way and gone on with by a new engine,
must have the same losses.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.conf.compose import compose
from shardwright.conf.schema import Config
from shardwright.data.batch_size import BatchSizes
from shardwright.data.loader import Batch, batches
from shardwright.data.sampler import DataPosition
from shardwright.data.source import Source
from shardwright.data.stream import Stream
from shardwright.pretrain.schedule import next_update

from .one_rank import OneRank

if TYPE_CHECKING:
    from shardwright.parallel.mcore.engine import Engine

ONE = "--one"
"""Before the precision that a process is to train."""
RECIPES = ("fp8_delayed", "fp8_current", "fp8_blockwise", "fp8_guide")
SEEDS = (1, 2, 3)
NUM_STEPS, NUM_LAST, NUM_EVALUATION = 300, 20, 8
DETERMINISTIC = "execution=deterministic"
MODEL = (
    DETERMINISTIC,
    *("model=gpt3_125m", "model.vocab_size=2048", "model.max_position_embeddings=1024", "data=python_stdlib"),
    *("data.seq_length=1024", "data.micro_batch_size=16", "data.global_batch_size=16", "cluster.ranks=1"),
    *("optimizer.lr=6e-4", "optimizer.min_lr=6e-5", "schedule.lr_warmup_iters=30"),
    *(f"schedule.train_iters={NUM_STEPS}", f"schedule.lr_decay_iters={NUM_STEPS}"),
)


def configuration(precision: str, seed: int, cache: str) -> Config:
    """Of one run."""
    return compose([*MODEL, f"precision={precision}", f"run.seed={seed}", f"data.cache_dir={cache}"])


def open_stream(split: str, seed: int, num_steps: int, cache: str) -> Stream:
    """The samples of some steps, in the order of a seed."""
    from shardwright.parallel.mcore.datasets import gpt_epoch

    data = configuration("bf16", seed, cache).data
    return Source(data, seed=seed, build_epoch=gpt_epoch).stream(split, num_steps * data.global_batch_size)


def steps_of(config: Config, stream: Stream, num_steps: int) -> Iterator[list[Batch]]:
    """The micro-batches of steps, as `train` has them."""
    return batches(
        stream,
        DataPosition(),
        batch_sizes=BatchSizes.of(config.data),
        micro_batch_size=config.data.micro_batch_size,
        dp_rank=0,
        dp_size=1,
        num_workers=0,
        num_steps=num_steps,
    )


def losses_of(engine: "Engine", training: Stream, steps: range) -> list[float]:
    """Train some steps."""
    config, losses = engine.config, []
    for step, microbatches in zip(
        steps, islice(steps_of(config, training, NUM_STEPS), steps.start, None), strict=False
    ):
        update = next_update(step, step * config.data.global_batch_size, config)
        losses.append(engine.train_step(microbatches, update.learning_rate, update.weight_decay).loss)
    return losses


def train(rank: OneRank, config: Config, training: Stream, validation: Stream) -> dict[str, Any]:
    """One run: its training losses and its validation loss."""
    engine = rank.engine_of(config)
    began = time.monotonic()
    losses = losses_of(engine, training, range(NUM_STEPS))
    seconds = time.monotonic() - began
    evaluated, _ = engine.evaluate(steps_of(config, validation, NUM_EVALUATION))
    del engine
    rank.forget()
    return {"validation": evaluated, "last": statistics.mean(losses[-NUM_LAST:]), "losses": losses, "seconds": seconds}


def resumed_losses(rank: OneRank, config: Config, training: Stream, folder: Path) -> list[float]:
    """The same run, but saved half way, forgotten, and gone on with by another engine."""
    from shardwright.parallel.mcore import shards

    folder.mkdir()
    half = NUM_STEPS // 2
    engine = rank.engine_of(config)
    losses = losses_of(engine, training, range(half))
    shards.save(engine, folder)
    del engine
    rank.forget()
    engine = rank.engine_of(config)
    shards.load(engine, folder, with_rng=True)
    losses += losses_of(engine, training, range(half, NUM_STEPS))
    del engine
    rank.forget()
    return losses


def run_all_seeds(precision: str, results: Path, *, resumes: bool) -> None:
    """This process's share: every seed of one precision, written into `results`.

    Args:
        precision: choice of the group.
        results: JSON file.
        resumes: whether the last seed is trained once more, saved half way.
    """
    rank, runs = OneRank("cuda", DETERMINISTIC), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as cache:
        training = {seed: open_stream("train", seed, NUM_STEPS, cache) for seed in SEEDS}
        validation = open_stream("validation", 0, NUM_EVALUATION, cache)
        for seed in SEEDS:
            run = train(rank, configuration(precision, seed, cache), training[seed], validation)
            runs.append({"precision": precision, "seed": seed, **run})
            shown = f"{run['losses'][0]:.4f} {run['last']:.4f} {run['validation']:.5f} {run['seconds']:.1f} s"
            print(f"{precision} seed {seed}: {shown}", flush=True)
            results.write_text(json.dumps(runs))
        if resumes:
            config = configuration(precision, SEEDS[-1], cache)
            losses = resumed_losses(rank, config, training[SEEDS[-1]], Path(cache) / "saved")
            equal = "the same losses" if losses == runs[-1]["losses"] else "OTHER LOSSES"
            print(f"{precision}, saved after step {NUM_STEPS // 2} and gone on with: {equal}", flush=True)


def show(runs: list[dict[str, Any]], recipes: tuple[str, ...]) -> None:
    """Print the table of every recipe against BF16, by validation loss and by the last training losses."""
    for measured in ("validation", "last"):
        bf16 = [run[measured] for run in runs if run["precision"] == "bf16"]
        deviation = statistics.stdev(bf16)
        print(f"{measured}: bf16 {' '.join(f'{loss:.5f}' for loss in bf16)}, standard deviation {deviation:.5f}")
        for recipe in recipes:
            narrow = [run[measured] for run in runs if run["precision"] == recipe]
            pairs = [ours - theirs for ours, theirs in zip(narrow, bf16, strict=True)]
            mean = statistics.mean(pairs)
            verdict = "pass" if abs(mean) <= deviation else "LARGER"
            shown = " ".join(f"{pair:+.5f}" for pair in pairs)
            print(f"| {recipe} | {' '.join(f'{loss:.5f}' for loss in narrow)} | {shown} | {mean:+.5f} | {verdict} |")


def main(results: Path, recipes: tuple[str, ...]) -> None:
    """Start a process for each precision, all at once, and put together what they found."""
    parts = {precision: results.with_suffix(f".{precision}.json") for precision in ("bf16", *recipes)}
    command = [sys.executable, "-m", "tests.gpu.convergence", str(results)]
    started = [subprocess.Popen([*command, ONE, precision]) for precision in parts]
    codes = [process.wait() for process in started]
    assert not any(codes), codes
    runs = [run for part in parts.values() for run in json.loads(part.read_text())]
    results.write_text(json.dumps(runs))
    show(runs, recipes)


if __name__ == "__main__":
    file, *chosen = sys.argv[1:]
    if chosen[:1] == [ONE]:
        part = Path(file).with_suffix(f".{chosen[1]}.json")
        run_all_seeds(chosen[1], part, resumes=chosen[1] == RECIPES[0])
    else:
        main(Path(file), tuple(chosen) or RECIPES)
