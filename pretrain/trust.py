"""Whose files are these? A checkpoint that others may have written needs `checkpoint.trusted=true`.

Digests find what differs from what was written, and whoever writes a checkpoint writes its digests too. The file system
tells who: a checkpoint is one's own if every file of it belongs to the user who starts the run, or to root, and not
everybody may change it. Anything else that `checkpoint.load` names is foreign. To trust it is a decision about weights:
what a checkpoint wants to run is refused whoever wrote it (`parallel/mcore/safe_load.py`). A run's own folder is not
asked about, since its mode is 0700.
"""

import os
import pwd
import stat
from pathlib import Path

_ROOT = 0


def foreign(folder: Path) -> str | None:
    """Why a checkpoint is not one's own: the first file or folder of it that others own or may change; None if none."""
    for path in (folder, *sorted(folder.rglob("*"))):
        found = path.stat()
        if found.st_uid not in (os.geteuid(), _ROOT):
            return f"{_name(path, folder)} belongs to {_user(found.st_uid)}"
        if found.st_mode & stat.S_IWOTH:
            return f"{_name(path, folder)} may be changed by everybody"
    return None


def _name(path: Path, folder: Path) -> str:
    return "its folder" if path == folder else str(path.relative_to(folder))


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user number {number}"
