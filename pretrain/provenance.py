"""Where the numbers of an attempt come from: code, versions, machine; written beside its logs.

The git state is that of the checkout which holds this file, and only if git tracks it there: an installed package may
lie inside of somebody else's repository. No environment variable is recorded, since secrets live there.
"""

import getpass
import os
import platform
import socket
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from shardwright.pretrain.events import now
from shardwright.pretrain.machine import Machine

_PACKAGES = (
    "shardwright",
    "torch",
    "megatron-core",
    "transformer-engine",
    "triton",
    "numpy",
    "hydra-core",
    "tokenizers",
)
_LARGEST_DIFF = 1_000_000
_GIT_SECONDS = 10


def gather(machine: Machine) -> dict[str, Any]:
    """Everything worth knowing when a number has to be explained later; plain JSON values."""
    return {
        "time": now(),
        "host": socket.gethostname(),
        "user": _user(),
        "command": sys.argv,
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        "machine": asdict(machine),
        "git": git_state(Path(__file__).resolve()),
    }


def git_state(file: Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the checkout that tracks `file`; None where there is none.

    Args:
        file: a source file.

    Returns:
        `sha`, `dirty`, and `diff` against that commit (tracked files; cut at 1 MB).
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    sha, diff = _git(file.parent, "rev-parse", "HEAD"), _git(file.parent, "diff", "--no-ext-diff", "HEAD")
    if sha is None or diff is None:
        return None
    return {"sha": sha.strip(), "dirty": bool(diff), "diff": diff[:_LARGEST_DIFF]}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def versions() -> dict[str, str | None]:
    """Versions of the packages that results depend on; None for one that is not there."""
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without an entry in passwd
        return None
