"""Folders that are built once and shared by runs: a lock, a partial folder beside, one rename.

Every rank of every run may ask for the same folder at the same time. The first one in builds it under a lock that the
kernel releases when its holder dies; the others wait and find it finished. A folder that stands under its final name is
complete, always: it is filled under another name, flushed to the disk, and renamed. What a killed process left behind
has the other name and is thrown away by the next builder.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from shardwright.conf.problems import Problem, RefusedError


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Make `folder` exist, complete; a call that finds it does nothing at all, and takes no lock.

    Any number of processes may call this at once, with or without a process group.

    Args:
        folder: final name; its parent is created as well.
        build: fills the folder that it is given (another name than `folder`) with files and subfolders.

    Returns:
        `folder`.

    Raises:
        RefusedError: the place cannot be written; whatever `build` refuses. Nothing is left of a failed build.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                _build(folder, folder.with_name(f".{folder.name}.partial"), build)
    except OSError as error:
        unwritable = Problem(
            key="data.cache_dir",
            value=folder.parent,
            rule=f"{folder.name} cannot be built there: {error}",
            remedy="give a folder that can be written and has room",
        )
        raise RefusedError([unwritable]) from error
    return folder


def _build(folder: Path, partial: Path, build: Callable[[Path], object]) -> None:
    """Fill `partial` and commit it as `folder`; the caller holds the lock."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        for path in (*partial.rglob("*"), partial):
            flush(path)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush(folder.parent)


def flush(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
