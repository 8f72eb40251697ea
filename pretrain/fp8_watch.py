"""What the loop does for narrow formats beside its steps: compare the amax state, sample what is quantised, guard.

* The self-check proves that histories and scales are bit-identical on all ranks that share them, after the first step
  of an attempt (so also after a resume) and every `precision.amax_check_interval` steps.
* Samples go into `fp8.jsonl`, a row for each operand of each layer, and as histograms to TensorBoard where it is
  installed. Their cost is bounded: what a sample took longer than other steps is at most `telemetry.fp8_share` of the
  steps until the next one, which otherwise comes later than `telemetry.fp8_interval`.
* The guard (`fp8_guard`) is told of steps and samples, and its decision is put into the layers.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from shardwright.conf.choices import CudaGraph, Fp8Format
from shardwright.conf.schema import Config
from shardwright.parallel.fp8.formats import E4M3, E5M2
from shardwright.parallel.fp8.statistics import Numbers
from shardwright.parallel.mcore.engine import Engine, StepResult
from shardwright.parallel.mcore.fp8_samples import Measured, Samples
from shardwright.pretrain import fp8_histograms
from shardwright.pretrain.events import JsonLines, now
from shardwright.pretrain.faults import TrainingFault
from shardwright.pretrain.fp8_guard import Guard, Sample
from shardwright.pretrain.rank import RankContext
from shardwright.pretrain.trainer_state import TrainerState

INTERVAL = 100
"""Steps between samples where the configuration leaves it open."""
_KEPT_SECONDS = 20
"""Steps whose median says what one takes without a sample."""
_NAMED = 8


def interval(config: Config) -> int:
    """Steps between two samples; 0 for none."""
    precision, chosen = config.precision, config.telemetry.fp8_interval
    if precision.fp8 is None and precision.fp4 is None:
        return 0
    if chosen is None:
        return INTERVAL if config.execution.cuda_graph_impl is CudaGraph.none else 0
    return chosen


class Fp8Watch:
    """One rank's part; every method is called by all ranks together.

    Args:
        context: of the rank.
        engine: whose layers are watched.
        guard: where the guard stands; its decision is put into the layers at once.
    """

    def __init__(self, context: RankContext, engine: Engine, guard: Guard) -> None:
        self._context, self._config, self._engine = context, context.config, engine
        self._rank, self._narrow = context.environment.rank, engine.narrow
        self._samples = (
            Samples(engine.narrow, self._config.precision, engine.layout, self._rank, engine.control_group)
            if engine.narrow.is_narrow
            else None
        )
        self._interval = interval(self._config)
        self._next_sample, self._next_check = 0, 0
        self._sampling = False
        self._seconds: deque[float] = deque(maxlen=_KEPT_SECONDS)
        self._rows = JsonLines(context.folder.fp8)
        self._histograms = fp8_histograms.Histograms(context.folder.path / "tensorboard")
        self._narrow.demote(guard.in_bf16)

    def before_step(self, update: int, guard: Guard) -> None:
        """Catch what the update quantises, where a sample is due or the guard waits for one."""
        if not self._interval or self._samples is None:
            return
        if not self._next_sample:  # a multiple of the interval, so that attempts sample the same steps
            self._next_sample = -(-update // self._interval) * self._interval
        self._sampling = update >= self._next_sample or bool(guard.trouble)
        if self._sampling:
            self._samples.begin()

    def after_step(self, state: TrainerState, result: StepResult, *, finite: bool, seconds: float) -> TrainerState:
        """Check, sample and guard as the step asks for it.

        Args:
            state: after the step.
            result: of the step.
            finite: whether everything in it was.
            seconds: that it took.

        Raises:
            TrainingFault: amax histories or scales differ between ranks that share them; on all ranks alike.
        """
        if not self._narrow.is_narrow:
            return state
        self._check(state.step)
        guard, how = state.fp8_guard, self._config.resilience
        if how.fp8_guard:
            layers = {tensor.split()[0] for _, tensor in result.non_finite_amaxes}
            guard = guard.after_step(result.loss, finite=finite, bad_layers=layers, step=state.step, how=how)
        if self._sampling:
            guard = self._sampled(state.step, guard, seconds)
        else:
            self._seconds.append(seconds)
        if guard.in_bf16 != state.fp8_guard.in_bf16:
            self._narrow.demote(guard.in_bf16)
            self._tell(state, guard, not_finite=bool(result.non_finite_amaxes))
        return replace(state, fp8_guard=guard)

    def go_back(self, guard: Guard) -> None:
        """The run stands at an earlier step: check it, and sample again from there on."""
        self._next_sample = self._next_check = 0
        if self._narrow.is_narrow:
            self._narrow.demote(guard.in_bf16)

    def _check(self, step: int) -> None:
        """Compare the amax state over the ranks that share it, where that is due."""
        every = self._config.precision.amax_check_interval
        if not (every and self._narrow.is_delayed and step >= self._next_check):
            return
        self._next_check = (step // every + 1) * every
        began = time.monotonic()
        differences = self._narrow.differences()
        if differences:
            named = "; ".join(map(str, differences[:_NAMED])) + "; ..." * (len(differences) > _NAMED)
            text = f"step {step}: {len(differences)} tensors of the amax state differ between ranks that share them"
            raise TrainingFault(f"{text}: {named}")
        if self._rank == 0:
            seconds = round(time.monotonic() - began, 4)
            self._context.events.write("amax_check", step, tensors=len(self._narrow.amax_state()), seconds=seconds)

    def _sampled(self, step: int, guard: Guard, seconds: float) -> Guard:
        """Write a sample down, and let the guard judge it.

        Collective: gather to rank 0, and a broadcast from it, over the world's control group.
        """
        assert self._samples is not None
        began = time.monotonic()
        measured = self._samples.end()
        told: list[Any] = [None, None]
        if measured is not None:
            rows = [self._row(key, measured[key]) for key in sorted(measured)]
            self._write(step, rows, measured)
            usual = statistics.median(self._seconds) if self._seconds else None
            cost = time.monotonic() - began + (max(0.0, seconds - usual) if usual else 0.0)
            told = [_next_interval(self._interval, cost, usual, self._config.telemetry.fp8_share), _samples(rows)]
            worst = sorted((row for row in rows if row["sqnr_db"] is not None), key=lambda row: row["sqnr_db"])[:3]
            self._context.events.write(
                "fp8_sample",
                step,
                tensors=len(rows),
                seconds=round(cost, 4),
                next_interval=told[0],
                worst=[f"{row['layer']} {row['operand']} {row['sqnr_db']} dB" for row in worst],
            )
        dist.broadcast_object_list(told, src=0, group=self._engine.control_group)
        steps, samples = told
        self._next_sample, self._sampling = (step // steps + 1) * steps, False
        how = self._config.resilience
        return guard.after_sample([Sample(*sample) for sample in samples], step, how) if how.fp8_guard else guard

    def _row(self, key: tuple[str, str], found: tuple[Numbers, float | None, bool]) -> dict[str, Any]:
        """A row of `fp8.jsonl`."""
        (layer, operand), (numbers, scale, in_bf16) = key, found
        precision, sqnr = self._config.precision, numbers.sqnr_db
        largest = (E5M2 if operand == "dy" and precision.fp8 is Fp8Format.hybrid else E4M3).max
        return {
            "layer": layer,
            "operand": operand,
            "bf16": in_bf16,
            "amax": numbers.amax,
            "scale": scale,
            "underflow": numbers.underflow_share,
            "overflow": numbers.overflow_share,
            "non_finite": int(numbers.non_finite),
            "sqnr_db": None if sqnr is None else round(sqnr, 3),
            "staleness": None if scale is None else numbers.amax * scale * 2.0**precision.fp8_margin / largest,
        }

    def _write(self, step: int, rows: Iterable[dict[str, Any]], measured: Measured) -> None:
        for row in rows:
            self._rows.append({"time": now(), "attempt": self._context.attempt.number, "step": step, **row})
        self._histograms.write(step, {key: numbers for key, (numbers, _, _) in measured.items()})

    def _tell(self, state: TrainerState, guard: Guard, *, not_finite: bool) -> None:
        """Write down what the guard changed."""
        if self._rank != 0:
            return
        before, after = set(state.fp8_guard.in_bf16), set(guard.in_bf16)
        demoted, promoted = sorted(after - before), sorted(before - after)
        why = "beyond the limits" if demoted else "within the limits again"
        if demoted and (not_finite or state.fp8_guard.trouble):
            why = "quantised what is not finite" if not_finite else state.fp8_guard.trouble
        self._context.events.write(
            "fp8_guard", state.step, demoted=demoted, promoted=promoted, in_bf16=len(after), reason=why
        )


def _next_interval(configured: int, cost: float, usual: float | None, share: float) -> int:
    """Steps until the next sample: so many that this one's seconds are a small share of theirs."""
    return configured if not usual else max(configured, math.ceil(cost / (share * usual)))


def _samples(rows: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What the guard needs of the rows."""
    return [(row["layer"], row["operand"], row["overflow"], row["underflow"], row["sqnr_db"]) for row in rows]
