"""`shardwright checkpoint list|inspect|verify`: what lies in a run's folder, without loading it.

All that is told comes from names, sizes, `trainer.json` and the manifest; only `verify` reads contents. Nothing is
unpickled and no torch is imported, so that any folder, also one that somebody hands over, can be looked at.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwright.conf.problems import Problem, RefusedError
from shardwright.pretrain import checkpoint_integrity, checkpoint_store, checkpoint_trouble, summary
from shardwright.pretrain.faults import DAMAGED

_LISTED_FILES = 20
"""Names of files that `inspect` prints; `--json` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One folder below the checkpoints."""

    name: str
    path: str
    step: int | None
    state: str
    """whole (by names and sizes), damaged, unloadable (attempts died over it), superseded or unfinished."""
    reason: str | None
    """What is damaged, or how loading it failed."""
    loss: float | None
    validation_loss: float | None
    num_bytes: int
    layout: Mapping[str, int]
    precision: str | None
    versions: Mapping[str, str | None]
    attempt: int | None
    time: str | None
    age_seconds: float
    trainer: Mapping[str, Any]


def entries(path: Path) -> list[Entry]:
    """What there is, oldest step first.

    Args:
        path: a run's folder, its checkpoints' folder, or one checkpoint.

    Raises:
        RefusedError: there is nothing that looks like a checkpoint.
    """
    if (path / checkpoint_store.MANIFEST).exists() or checkpoint_store.step_of(path) is not None:
        return [_entry(path, checkpoint_trouble.unloadable(path.parent).get(path))]
    for root in (path / "checkpoints", path):
        folders = [folder for folder in root.glob("*step_*") if folder.is_dir()] if root.is_dir() else []
        if folders:
            reasons = checkpoint_trouble.unloadable(root)
            found = [_entry(folder, reasons.get(folder)) for folder in folders]
            return sorted(found, key=lambda entry: (entry.step or 0, entry.name))
    what = "holds no checkpoint" if path.is_dir() else "is not there"
    remedy = "name a run's folder, its checkpoints' folder or one checkpoint"
    raise RefusedError([Problem(key="PATH", value=path, rule=what, remedy=remedy)])


def _entry(path: Path, unloadable: str | None) -> Entry:
    """One checkpoint; `unloadable` is how loading it failed."""
    named = checkpoint_store.step_of(path.with_name("step_" + path.name.rpartition("step_")[2]))
    unfinished = path.name.startswith(".")
    reason = None if unfinished else checkpoint_store.damage(path)
    try:
        told = checkpoint_store.trainer(path)
    except (OSError, ValueError):
        told = {}
    if unfinished:
        state = "unfinished"
    elif reason:
        state = "damaged"
    elif unloadable:
        state, reason = "unloadable", unloadable
    else:
        state = "whole" if path.name.startswith("step_") else "superseded"
    written = datetime.fromisoformat(told["time"]).timestamp() if told.get("time") else path.stat().st_mtime
    return Entry(
        name=path.name,
        path=str(path),
        step=told.get("step", named),
        state=state,
        reason=reason,
        loss=told.get("loss"),
        validation_loss=told.get("validation_loss"),
        num_bytes=sum((path / name).stat().st_size for name in checkpoint_store.files(path)),
        layout=told.get("layout", {}),
        precision=told.get("precision"),
        versions=told.get("versions", {}),
        attempt=told.get("attempt"),
        time=datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds"),
        age_seconds=round(max(0.0, time.time() - written), 1),
        trainer=told,
    )


def show_list(path: Path, *, as_json: bool, show: Callable[[str], None]) -> int:
    """A row for each checkpoint; returns the exit code."""
    found = entries(path)
    if as_json:
        show(json.dumps([asdict(entry) for entry in found], indent=1))
        return 0
    rows: list[list[object]] = [["step", "loss", "validation", "size", "layout", "precision", "age", "state"]]
    rows += [
        [
            "?" if entry.step is None else entry.step,
            summary.number(entry.loss),
            summary.number(entry.validation_loss),
            summary.size(entry.num_bytes),
            layout_name(entry.layout),
            entry.precision or "",
            age(entry.age_seconds),
            f"{entry.state}: {entry.reason}" if entry.reason else entry.state,
        ]
        for entry in found
    ]
    show(summary.columns(rows))
    return 0


def choose(path: Path, step: int | None) -> Entry:
    """One of what there is: that of `step`, else the newest whole one, else the newest.

    Raises:
        RefusedError: there is none, or none of that step.
    """
    found = entries(path)
    fitting = [entry for entry in found if step is None or entry.step == step]
    if not fitting:
        there = ", ".join(str(entry.step) for entry in found)
        raise RefusedError(
            [Problem(key="--step", value=step, rule=f"{path} has no such step", remedy=f"it has {there}")]
        )
    return ([entry for entry in fitting if entry.state == "whole"] or fitting)[-1]


def show_one(path: Path, step: int | None, *, as_json: bool, show: Callable[[str], None]) -> int:
    """All that is known of one checkpoint: of `step`, else the newest whole one, else the newest."""
    entry = choose(path, step)
    files = {name: (Path(entry.path) / name).stat().st_size for name in checkpoint_store.files(Path(entry.path))}
    if as_json:
        show(json.dumps({**asdict(entry), "files": files}, indent=1))
        return 0
    told = entry.trainer
    facts = {
        "checkpoint": entry.path,
        "state": f"{entry.state}: {entry.reason}" if entry.reason else f"{entry.state}, contents not read",
        "step": entry.step,
        "written": f"{entry.time}, {age(entry.age_seconds)} ago, by attempt {entry.attempt}",
        "loss": summary.number(entry.loss),
        "validation loss": summary.number(entry.validation_loss),
        "trained tokens": told.get("trained_tokens"),
        "consumed samples": told.get("consumed_samples"),
        "data": told.get("data"),
        "layout": layout_name(entry.layout),
        "precision": entry.precision,
        "versions": ", ".join(f"{name} {version}" for name, version in entry.versions.items() if version),
        "size": f"{summary.size(entry.num_bytes)} in {len(files)} files",
    }
    show("\n".join(f"{name:<18}{value}" for name, value in facts.items() if value is not None and value != ""))
    largest = sorted(files.items(), key=lambda item: (-item[1], item[0]))
    show(summary.columns([["file", "size"], *([name, summary.size(size)] for name, size in largest[:_LISTED_FILES])]))
    if len(largest) > _LISTED_FILES:
        show(f"... and {len(largest) - _LISTED_FILES} smaller ones")
    return 0


def show_verified(path: Path, step: int | None, *, as_json: bool, show: Callable[[str], None]) -> int:
    """Read every byte of every checkpoint (or of one step's); the exit code is 4 where one is damaged."""
    chosen = [entry for entry in entries(path) if entry.state != "unfinished" and step in (None, entry.step)]
    if not chosen:
        raise RefusedError([Problem(key="--step", value=step, rule=f"{path} has no finished checkpoint of it")])
    results = []
    for entry in chosen:
        verdict = checkpoint_integrity.verify(Path(entry.path))
        results.append({"name": entry.name, "step": entry.step, "whole": not verdict.reasons, **asdict(verdict)})
        if not as_json:
            speed = verdict.num_bytes / max(verdict.seconds, 1e-9)
            read = f"{summary.size(verdict.num_bytes)} in {verdict.seconds:.1f} s, {summary.size(speed)}/s"
            show(f"{entry.name}: {'damaged: ' + '; '.join(verdict.reasons) if verdict.reasons else f'whole ({read})'}")
    if as_json:
        show(json.dumps(results, indent=1))
    return 0 if all(result["whole"] for result in results) else DAMAGED


def layout_name(layout: Mapping[str, int]) -> str:
    """`4 ranks TP2 PP2`; data parallelism is what remains."""
    axes = [f"{axis.upper()}{size}" for axis, size in layout.items() if axis != "world_size" and size > 1]
    ranks = layout.get("world_size")
    return "" if ranks is None else " ".join([f"{ranks} rank{'s' * (ranks > 1)}", *axes])


def age(seconds: float) -> str:
    """A time span in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
