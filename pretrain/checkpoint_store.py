"""Policy of checkpoints on disk: what is whole, how one is committed, which stay, which one a run continues from.

A checkpoint is written into a temporary folder beside the final ones. Manifest (every file with its size and SHA-256)
and marker are written and synced INSIDE it; then one rename commits it and the parent folder is synced. So a folder
named `step_00000100` is whole or does not exist, whenever a kill comes. The file `latest` is a hint for people;
nothing reads it. Removal renames first and deletes then, for the same reason.

No torch here: the launcher decides what to resume from before any rank exists. The bytes: `parallel/mcore/shards.py`.
"""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.conf.choices import ResumeMode
from shardwright.conf.problems import Problem, RefusedError
from shardwright.conf.schema import Checkpoint
from shardwright.data.cache import flush
from shardwright.pretrain.folder import write_atomic

MANIFEST, MARKER, TRAINER = "manifest.json", "COMMITTED", "trainer.json"
_STEP_FOLDER = re.compile(r"step_(\d{8,})")
_TEMPORARY, _REMOVED = ".writing_", ".removing_"


@dataclass(frozen=True, slots=True)
class Committed:
    """A whole checkpoint on disk."""

    step: int
    path: Path

    @property
    def num_bytes(self) -> int:
        """Size of all files by the manifest."""
        return sum(entry["bytes"] for entry in _manifest_files(self.path).values())


def step_folder(root: Path, step: int) -> Path:
    """Final folder of a step's checkpoint."""
    return root / f"step_{step:08d}"


def damage(path: Path) -> str | None:
    """Why a checkpoint folder is not whole, by marker, manifest and file sizes; None where it is."""
    if not (path / MARKER).is_file():
        return f"no marker {MARKER}: it was never committed"
    try:
        files = _manifest_files(path)
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, the manifest says {entry['bytes']}"
    return None


def committed(root: Path) -> list[Committed]:
    """Whole checkpoints below `root`, oldest first."""
    found = []
    for path in root.glob("step_*") if root.is_dir() else ():
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and damage(path) is None:
            found.append(Committed(int(match[1]), path))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def find(config: Checkpoint, root: Path) -> Committed | None:
    """The checkpoint that a run with folder `root` starts from; None for a start at step 0.

    Raises:
        RefusedError: what was asked for does not exist (the message lists what does), or exists against `resume=never`.
    """
    own = committed(root)
    if own and config.resume is ResumeMode.never:
        raise RefusedError(
            [
                Problem(
                    key="checkpoint.resume",
                    value="never",
                    rule=f"the run's folder already holds {_steps(own)}",
                    remedy="give the new run another run.dir, or continue this one with checkpoint.resume=auto",
                )
            ]
        )
    if own:
        return _choose(config, own, root)
    if config.load is not None:
        return _choose(config, _foreign(Path(config.load)), Path(config.load))
    if config.resume is ResumeMode.must:
        raise RefusedError(
            [
                Problem(
                    key="checkpoint.resume",
                    value="must",
                    rule=f"there is no whole checkpoint in {root}{_damaged(root)}",
                    remedy="checkpoint.resume=auto starts at step 0",
                )
            ]
        )
    return _choose(config, own, root) if config.load_step is not None else None


def _foreign(path: Path) -> list[Committed]:
    """Checkpoints that `checkpoint.load` names: one checkpoint, a checkpoints folder, or a run's folder."""
    match = _STEP_FOLDER.fullmatch(path.name)
    if match and path.is_dir():
        reason = damage(path)
        if reason is None:
            return [Committed(int(match[1]), path)]
        raise RefusedError([Problem(key="checkpoint.load", value=path, rule=f"this checkpoint is not whole: {reason}")])
    found = committed(path) or committed(path / "checkpoints")
    if not found:
        nearest = next(parent for parent in [path, *path.parents] if parent.exists())
        there = ", ".join(sorted(entry.name for entry in nearest.iterdir())[:10]) if nearest.is_dir() else "a file"
        raise RefusedError(
            [
                Problem(
                    key="checkpoint.load",
                    value=path,
                    rule=f"there is no whole checkpoint{_damaged(path)}",
                    remedy=f"{nearest} holds: {there or 'nothing'}",
                )
            ]
        )
    return found


def _choose(config: Checkpoint, available: list[Committed], root: Path) -> Committed:
    if config.load_step is None:
        return available[-1]
    for checkpoint in available:
        if checkpoint.step == config.load_step:
            return checkpoint
    raise RefusedError(
        [
            Problem(
                key="checkpoint.load_step",
                value=config.load_step,
                rule=f"{root} holds {_steps(available)}{_damaged(root)}",
                remedy="name one of these, or leave checkpoint.load_step out for the newest",
            )
        ]
    )


def _steps(checkpoints: list[Committed]) -> str:
    if not checkpoints:
        return "no whole checkpoint"
    return "checkpoints of the steps " + ", ".join(str(checkpoint.step) for checkpoint in checkpoints)


def _damaged(root: Path) -> str:
    damaged = [(path.name, damage(path)) for path in sorted(root.glob("step_*"))] if root.is_dir() else []
    named = [f"{name} ({reason})" for name, reason in damaged if reason]
    return f"; not whole: {', '.join(named)}" if named else ""


# --- writing: rank 0 alone calls these, the run's lock keeps every other process out -------------------------------


def clean(root: Path) -> list[Path]:
    """Remove what killed processes left half written or half removed; returns what was removed."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    leftovers = [path for path in root.iterdir() if path.name.startswith((_TEMPORARY, _REMOVED))]
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def begin(root: Path, step: int) -> Path:
    """An empty temporary folder for a step's checkpoint."""
    temporary = root / f"{_TEMPORARY}step_{step:08d}"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(mode=0o700, parents=True)
    return temporary


def commit(temporary: Path, trainer_state: dict[str, Any], digests: dict[str, str]) -> Committed:
    """Write trainer state, manifest and marker into `temporary`, sync all, and make it the step's checkpoint.

    Args:
        temporary: folder from `begin`, with all shards written and synced.
        trainer_state: JSON-able; its "step" names the checkpoint.
        digests: SHA-256 of every file in it, as the ranks computed them.
    """
    root, step = temporary.parent, int(trainer_state["step"])
    write_atomic(temporary / TRAINER, json.dumps(trainer_state, indent=1))
    digests = {**digests, TRAINER: sha256(temporary / TRAINER)}
    entries = {
        name: {"bytes": (temporary / name).stat().st_size, "sha256": digest} for name, digest in sorted(digests.items())
    }
    write_atomic(temporary / MANIFEST, json.dumps({"format_version": 1, "step": step, "files": entries}, indent=1))
    write_atomic(temporary / MARKER, f"step {step}\n")
    flush(temporary)
    final = step_folder(root, step)
    if final.exists():  # only a damaged one of an earlier attempt can stand here
        _remove(final)
    temporary.rename(final)
    flush(root)
    write_atomic(root / "latest", f"{final.name}\n")
    return Committed(step, final)


def retain(root: Path, keep_last: int) -> list[Path]:
    """Remove all but the newest `keep_last` whole checkpoints; returns what was removed."""
    old = [checkpoint.path for checkpoint in committed(root)[:-keep_last]]
    for path in old:
        _remove(path)
    return old


def supersede(root: Path, loaded_step: int, attempt: int) -> list[Path]:
    """Put checkpoints newer than the loaded step aside, so that the next start does not jump back to them."""
    renamed = []
    for checkpoint in committed(root):
        if checkpoint.step > loaded_step:
            aside = root / f"superseded_by_attempt_{attempt:03d}_{checkpoint.path.name}"
            if aside.exists():
                shutil.rmtree(aside)
            checkpoint.path.rename(aside)
            renamed.append(aside)
    return renamed


def files(folder: Path) -> list[str]:
    """Names of all files below a folder, relative to it, sorted: every rank sees the same order."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_files(path: Path) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_text())["files"]
    return files


def _remove(path: Path) -> None:
    doomed = path.with_name(_REMOVED + path.name)
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    flush(path.parent)
    shutil.rmtree(doomed)
