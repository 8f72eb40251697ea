"""What `bench step` measured, as numbers: statistics of one measurement, the ratio of two loops, JSON and a table.

Speed is that of the median step, since single steps are disturbed by others and none is ever too fast; p10 and p90 say
how much they differ.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shardwright.pretrain import plan, provenance, terminal
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.plan import Plan
from shardwright.pretrain.summary import count, size

ORDER = ("ours", "bare", "bare", "ours")
"""A B B A: what drifts evenly over the four measurements cancels in the ratio."""
QUANTILES = {"median": 0.5, "p10": 0.1, "p90": 0.9}


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One measurement: the timed steps of one loop in its own processes."""

    loop: str
    """ours or bare."""
    step_seconds: list[float]
    """Of every timed step."""
    warmup_seconds: list[float]
    processor_seconds: list[float]
    """Of every timed step, of all threads of rank 0: what others on the machine take does not count."""
    tokens_per_second: float
    """Of all ranks; of the median step, as the following."""
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    """Causal, nothing added for recomputation."""
    mfu: float | None
    """Share of the device's dense BF16 peak, whatever the precision; None where that is not known."""
    memory: dict[str, int]
    """Peak of the rank that took most."""
    gpus: list[dict[str, float | None]] | None
    """Clocks, temperature and power of every GPU when the last step was done."""
    losses: list[float]
    """Of every step, the warm-up included."""

    waits: dict[str, int] | None
    """Waits of the host for the device in one more step, by part; None where none was traced."""

    def quantile(self, share: float) -> float:
        """The seconds below which `share` of the timed steps lie, linear between neighbours."""
        ordered = sorted(self.step_seconds)
        place = share * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        return low + (high - low) * (place - math.floor(place))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Tokens per second of ours over those of the bare loop."""

    pairs: list[float]
    """Of each measurement of ours and the neighbouring one of the bare loop."""
    processor: float
    """Geometric mean over the pairs of the bare loop's processor time over ours, of the median step of rank 0."""
    overall: float
    """Geometric mean of the pairs."""
    spread: float
    """Largest distance of a pair from `overall`; a difference that is smaller says nothing."""
    loss_difference: float
    """Largest relative difference of two losses of the same step: whether both sides did the same work."""


def speed_of(planned: Plan, loop: str, warmup: int, result: dict[str, Any]) -> Speed:
    """The measurement that a rank's `result.json` amounts to."""
    timed = result["seconds"][warmup:]
    tokens_per_second = planned.batch.tokens_per_step / statistics.median(timed)
    per_gpu = tokens_per_second / planned.layout.world_size
    flops, peak = per_gpu * planned.flops_per_token, plan.peak_flops(result["device"])
    return Speed(
        loop=loop,
        step_seconds=timed,
        warmup_seconds=result["seconds"][:warmup],
        processor_seconds=result["processor_seconds"][warmup:],
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=per_gpu,
        tflops_per_gpu=flops / 1e12,
        mfu=flops / peak if peak else None,
        memory=result["memory"],
        gpus=result["gpus"],
        losses=result["losses"],
        waits=result["waits"],
    )


def compare(speeds: Sequence[Speed]) -> Ratio:
    """Ours against the bare loop, from measurements in the order of `ORDER`, once or several times."""
    rounds, rest = divmod(len(speeds), len(ORDER))
    assert rest == 0 and tuple(speed.loop for speed in speeds) == ORDER * rounds
    neighbours = [tuple(sorted(pair, key=lambda speed: speed.loop)) for pair in batched(speeds, 2)]
    pairs = [ours.tokens_per_second / bare.tokens_per_second for bare, ours in neighbours]
    processor = [
        statistics.median(bare.processor_seconds) / statistics.median(ours.processor_seconds)
        for bare, ours in neighbours
    ]
    overall = statistics.geometric_mean(pairs)
    first, second = speeds[:2]
    return Ratio(
        pairs=pairs,
        processor=statistics.geometric_mean(processor),
        overall=overall,
        spread=max(abs(pair - overall) for pair in pairs),
        loss_difference=max(abs(a - b) / abs(b) for a, b in zip(first.losses, second.losses, strict=True)),
    )


def as_json(planned: Plan, found: Machine, warmup: int, speeds: Sequence[Speed], ratio: Ratio | None) -> dict[str, Any]:
    """All that was measured, and on what; plain JSON values."""
    measured, gathered = plan.as_json(planned), provenance.gather(found)
    git = gathered["git"]
    return {
        "time": gathered["time"],
        "command": gathered["command"][1:],
        "plan": {name: measured[name] for name in ("model", "layout", "batch", "precision")},
        "warmup": warmup,
        "steps": len(speeds[0].step_seconds),
        "measurements": [
            {
                "loop": speed.loop,
                **{f"{name}_seconds": speed.quantile(share) for name, share in QUANTILES.items()},
                **dataclasses.asdict(speed),
            }
            for speed in speeds
        ],
        "ratio": dataclasses.asdict(ratio) if ratio else None,
        "python": gathered["python"],
        "packages": gathered["packages"],
        "machine": gathered["machine"],
        "git": git and {"sha": git["sha"], "dirty": git["dirty"]},
    }


def show(planned: Plan, speeds: Sequence[Speed], ratio: Ratio | None) -> None:
    """Print a row per measurement, and the ratio below."""
    layout, batch, precision = planned.layout, planned.batch, planned.config.precision
    title = (
        f"{count(planned.parameters)} parameters, {plan.fp8_name(planned.config) or precision.dtype.name}, "
        f"{layout.world_size} ranks (TP {layout.tp}, PP {layout.pp}, DP {layout.dp}), "
        f"{batch.num_microbatches} x {batch.micro_batch_size} x {planned.config.data.seq_length} tokens a rank"
    )
    console = _console()
    console.print(_table(title, "loop", [(speed.loop, speed, "") for speed in speeds]))
    if ratio is not None:
        pairs = ", ".join(f"{pair:.4f}" for pair in ratio.pairs)
        console.print(f"\nours / bare: {ratio.overall:.4f} ± {ratio.spread:.4f} of tokens/s (pairs {pairs})")
        console.print(f"bare / ours: {ratio.processor:.4f} of processor time on rank 0")
        console.print(f"losses of the same step differ by at most {ratio.loss_difference:.1e}")
    waits = speeds[0].waits
    if waits is not None:
        parts = ", ".join(f"{number} in {part}" for part, number in waits.items())
        console.print(f"\nthe host waited for the device in the traced step: {parts}")


def show_points(points: Sequence[tuple[str, Speed | int]]) -> None:
    """Print a row per point of a sweep, with its speed over the first one's; an exit code where it failed."""
    first = next((speed for _, speed in points if isinstance(speed, Speed)), None)
    rows: list[tuple[str, Speed | None, str]] = []
    for name, speed in points:
        if isinstance(speed, Speed) and first is not None:
            rows.append((name, speed, f"{speed.tokens_per_second / first.tokens_per_second:.4f}"))
        else:
            rows.append((name, None, f"exit {speed}"))
    _console().print(_table(f"{len(points)} points; x is tokens/s over the first", "overrides", rows))


def _table(title: str, what: str, rows: Sequence[tuple[str, Speed | None, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column(what, overflow="fold")
    names = ("ms/step", "p10", "p90", "tokens/s", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "peak", "MHz", "°C", "W")
    for name in (*names, "x") if any(note for _, _, note in rows) else names:
        table.add_column(name, justify="right")
    for name, speed, note in rows:
        cells = _cells(speed) if speed else ["-"] * len(names)
        table.add_row(name, *cells, *([note] if note else []))
    return table


def _cells(speed: Speed) -> list[str]:
    first = (speed.gpus or [{}])[0]
    return [
        *(f"{1000 * speed.quantile(share):.1f}" for share in QUANTILES.values()),
        f"{speed.tokens_per_second:,.0f}",
        f"{speed.tokens_per_second_per_gpu:,.0f}",
        f"{speed.tflops_per_gpu:.4g}",
        "-" if speed.mfu is None else f"{speed.mfu:.1%}",
        size(next(iter(speed.memory.values()))),
        *(_whole(first.get(name)) for name in ("sm_clock_mhz", "temperature_celsius", "power_watts")),
    ]


def _console() -> Console:
    return terminal.console(160)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
