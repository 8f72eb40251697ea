"""Checkpoints on disk: what is whole, how one is committed, which stay.

A checkpoint is written into a temporary folder beside the final ones. Manifest (every file with its size and SHA-256)
and marker (with the manifest's own SHA-256) are written and synced INSIDE it; then one rename commits it and the parent
folder is synced. So a folder named `step_00000100` is whole or does not exist, whenever a kill comes, and there is no
byte in it that nothing vouches for. The file `latest` is a hint for people; nothing reads it. Removal renames first and
deletes then, for the same reason.

No torch here: the launcher decides what to resume from before any rank exists (`checkpoint_choice`). Contents are
compared with the digests by the ranks, in parallel (`checkpoint_integrity`). The bytes: `parallel/mcore/shards.py`.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from shardwright.data.cache import flush
from shardwright.pretrain.folder import write_atomic

MANIFEST, MARKER, TRAINER, CONFIG = "manifest.json", "COMMITTED", "trainer.json", "config.yaml"
FORMAT_VERSION = 2
"""Of the manifest: 1 had no digest of it in the marker."""
SEEN_SECONDS = 60.0
"""So long a file that another machine has written may take to be seen here: NFS keeps listings for that long."""
_STEP_FOLDER = re.compile(r"step_(\d{8,})")
_TEMPORARY, _REMOVED = ".writing_", ".removing_"


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that is whole by marker, manifest and sizes."""

    step: int
    path: Path

    @property
    def num_bytes(self) -> int:
        """Size of all files by the manifest."""
        return sum(entry["bytes"] for entry in manifest(self.path).values())


@dataclass(frozen=True, slots=True)
class Damaged:
    """A folder that is named like a checkpoint and is not whole."""

    step: int
    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name} ({self.reason})"


def step_folder(root: Path, step: int) -> Path:
    """Final folder of a step's checkpoint."""
    return root / f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name says; None for other names."""
    match = _STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def damage(path: Path) -> str | None:
    """Why a checkpoint folder is not whole, by marker, manifest, names and sizes; None where it is."""
    try:
        marker = (path / MARKER).read_bytes()
    except FileNotFoundError:
        return f"no marker {MARKER}: it was never committed"
    except OSError as error:
        return f"{MARKER} cannot be read ({error})"
    try:
        content = (path / MANIFEST).read_bytes()
        told = json.loads(content)
        step, listed = told["step"], told["files"]
        if marker != _marker(step, content):
            return f"{MANIFEST} is not what {MARKER} vouches for"
        if step_of(path) not in (None, step):
            return f"{MANIFEST} is that of step {step}"
        there = {name: (path / name).stat().st_size for name in files(path)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, entry in listed.items():
        if name not in there:
            return f"{name} is missing"
        if there[name] != entry["bytes"]:
            return f"{name} has {there[name]} bytes, the manifest says {entry['bytes']}"
    unlisted = sorted(there.keys() - listed.keys() - {MANIFEST, MARKER})
    return f"{unlisted[0]} is not in the manifest" if unlisted else None


def _marker(step: int, manifest_content: bytes) -> bytes:
    """What `COMMITTED` holds."""
    return f"step {step}\n{MANIFEST} sha256 {hashlib.sha256(manifest_content).hexdigest()}\n".encode()


def survey(root: Path) -> tuple[list[Committed], list[Damaged]]:
    """What stands below `root` under the name of a step: whole ones and damaged ones, each oldest first."""
    whole, damaged = [], []
    found = [(step_of(path), path) for path in root.glob("step_*")] if root.is_dir() else []
    for step, path in sorted((step, path) for step, path in found if step is not None):
        reason = damage(path)
        if reason is None:
            whole.append(Committed(step, path))
        else:
            damaged.append(Damaged(step, path, reason))
    return whole, damaged


def committed(root: Path) -> list[Committed]:
    """Whole checkpoints below `root`, oldest first."""
    return survey(root)[0]


def manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> {"bytes", "sha256"} of every file of a checkpoint but manifest and marker."""
    listed: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_text())["files"]
    return listed


def trainer(path: Path) -> dict[str, Any]:
    """What `trainer.json` of a checkpoint holds."""
    content: dict[str, Any] = json.loads((path / TRAINER).read_text())
    return content


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


def commit(
    temporary: Path,
    trainer_state: Mapping[str, Any],
    written: Mapping[str, tuple[int, str]],
    *,
    config: str = "",
    seen_seconds: float = SEEN_SECONDS,
) -> Committed:
    """Write trainer state, manifest and marker into `temporary`, sync all, and make it the step's checkpoint.

    Args:
        temporary: folder from `begin`, with all shards written.
        trainer_state: JSON-able; its "step" names the checkpoint.
        written: bytes and SHA-256 of the files whose writers know them and have synced them; the others, small ones,
            are synced and digested here.
        config: the configuration of the attempt, as YAML.
        seen_seconds: how long to wait until this machine sees what others have written.

    Raises:
        OSError: the disk is full or cannot be written, or a file of `written` is not to be seen here as it was written.
    """
    root, step = temporary.parent, int(trainer_state["step"])
    _wait_to_see(temporary, written, seen_seconds)
    write_atomic(temporary / TRAINER, json.dumps(trainer_state, indent=1))
    write_atomic(temporary / CONFIG, config)
    entries = {}
    for name in files(temporary):
        if name not in written:
            flush(temporary / name)
        size, digest = written.get(name) or ((temporary / name).stat().st_size, sha256(temporary / name))
        entries[name] = {"bytes": size, "sha256": digest}
    text = json.dumps({"format_version": FORMAT_VERSION, "step": step, "files": entries}, indent=1)
    write_atomic(temporary / MANIFEST, text)
    write_atomic(temporary / MARKER, _marker(step, text.encode()).decode())
    flush(temporary)
    final = step_folder(root, step)
    if final.exists():  # only a damaged one of an earlier attempt can stand here
        _remove(final)
    temporary.rename(final)
    flush(root)
    write_atomic(root / "latest", f"{final.name}\n")
    return Committed(step, final)


def _wait_to_see(folder: Path, written: Mapping[str, tuple[int, str]], seconds: float) -> None:
    """Return when all files are there in full size: a manifest that lacked one would make the checkpoint worthless."""
    deadline = time.monotonic() + seconds
    for name, (size, _) in written.items():
        while not (folder / name).exists() or (folder / name).stat().st_size != size:
            if time.monotonic() >= deadline:
                raise OSError(f"{name} was written, and {seconds:g} s later its {size} bytes are not to be seen here")
            files(folder)  # reading the folder makes a network file system look anew
            time.sleep(0.1)


def retain(
    root: Path, keep_last: int, *, keep_every: int = 0, keep_best: int = 0, keep_hours: float = 0.0
) -> list[Path]:
    """Remove whole checkpoints but those that one of the rules keeps; returns what was removed.

    Args:
        root: folder of the checkpoints.
        keep_last: the newest ones that stay, at least 1: so one always does.
        keep_every: those of steps that are multiples of this stay too; 0 keeps none for it.
        keep_best: as many with the lowest validation loss stay too; one saved without an evaluation has none.
        keep_hours: those that were written in the last so many hours stay too.
    """
    assert keep_last >= 1
    whole, since = committed(root), time.time() - 3600 * keep_hours
    stay = {checkpoint.step for checkpoint in whole[-keep_last:]}
    stay |= {checkpoint.step for checkpoint in whole if keep_every and checkpoint.step % keep_every == 0}
    stay |= set(_best(whole)[:keep_best])
    stay |= {checkpoint.step for checkpoint in whole if keep_hours and _written_at(checkpoint) >= since}
    old = [checkpoint.path for checkpoint in whole if checkpoint.step not in stay]
    for path in old:
        _remove(path)
    return old


def _written_at(checkpoint: Committed) -> float:
    """Seconds since the epoch, by what was written into it: copies keep their age."""
    return datetime.fromisoformat(trainer(checkpoint.path)["time"]).timestamp()


def _best(checkpoints: Collection[Committed]) -> list[int]:
    """Steps by validation loss, the lowest first, of two equal ones the earlier first."""
    losses = {checkpoint.step: trainer(checkpoint.path).get("validation_loss") for checkpoint in checkpoints}
    known = {step: loss for step, loss in losses.items() if loss is not None}
    return sorted(known, key=lambda step: (known[step], step))


def supersede(root: Path, loaded_step: int, attempt: int) -> list[Path]:
    """Put checkpoints newer than the loaded step aside, so that the next start does not jump back to them."""
    whole, damaged = survey(root)
    renamed = []
    if whole and whole[-1].step > loaded_step:
        stay = [checkpoint.path.name for checkpoint in whole if checkpoint.step <= loaded_step]
        write_atomic(root / "latest", f"{stay[-1]}\n" if stay else "")
    standing: list[Committed | Damaged] = [*whole, *damaged]
    for path in [other.path for other in standing if other.step > loaded_step]:
        aside = root / f"superseded_by_attempt_{attempt:03d}_{path.name}"
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
        renamed.append(aside)
    return renamed


def files(folder: Path) -> list[str]:
    """Names of all files below a folder, relative to it, sorted: every rank sees the same order."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    doomed = path.with_name(_REMOVED + path.name)
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    flush(path.parent)
    shutil.rmtree(doomed)
