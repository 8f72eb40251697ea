"""`shardwright preflight --versions`: what is installed, which version is known to work, and what a difference means.

Packages come from the one table of `requirements`, by metadata; nothing is imported and no GPU is touched. What is no
Python package (driver, CUDA, NCCL, Slurm, containers) is asked of NVML, of files and of the programs themselves.
"""

import ctypes
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.pretrain import machine, requirements, terminal
from shardwright.pretrain.faults import NOT_FIT
from shardwright.pretrain.requirements import REQUIREMENTS

_PROGRAM_SECONDS = 10
_STYLES = {"known": "green", "other": "yellow", "there": "", "missing": "dim", "unfit": "bold red"}
_NAMES = {"megatron_core": "megatron-core", "hydra": "hydra-core", "nvidia_ml": "nvidia-ml-py", "apex": "NVIDIA's apex"}
_KNOWN_NCCL = "2.28.9"
_KNOWN_CUDA = "13.0"
_KNOWN_SLURM = "22.05"
_LEAST_DRIVER = 580
"""The driver that CUDA 13 needs. Source: CUDA 13.0 release notes, table "CUDA Toolkit and Minimum Required Driver"."""


@dataclass(frozen=True, slots=True)
class Row:
    """One part of the installation."""

    name: str
    installed: str | None
    known: str
    """The version that everything was checked with; empty where none was."""
    state: str
    """`known`; `other` than that; `there`, where none is known; `missing`; `unfit`: missing or too old where needed."""
    means: str


def run(*, as_json: bool) -> int:
    """Print the table; 5 where something is missing or too old that every run on this machine needs."""
    found = rows()
    if as_json:
        print(json.dumps([asdict(row) for row in found], indent=1))
    else:
        _show(found, terminal.console(120))
    return NOT_FIT if any(row.state == "unfit" for row in found) else 0


def rows() -> list[Row]:
    """Everything, in the order of the table."""
    here = machine.detect()
    on_gpus = bool(here.gpus)
    return [
        _python(),
        _package("torch", on_gpus),
        *_cuda(here, on_gpus),
        *(
            _package(feature, on_gpus)
            for feature in REQUIREMENTS
            if feature not in ("torch", "plotly", "sentencepiece")
        ),
        *_foreign_apex(),
        *_programs(),
    ]


def _python() -> Row:
    version = platform.python_version()
    fits = (3, 12) <= sys.version_info < (3, 14)
    return Row("python", version, "3.12", "known" if fits else "unfit", "" if fits else "3.12 or 3.13 is needed")


def _package(feature: str, on_gpus: bool) -> Row:
    """A row of the table of `requirements`."""
    requirement, installed = REQUIREMENTS[feature], requirements.version(feature)
    name = _NAMES.get(feature, requirement.distributions[0])
    needed = requirement.always or (
        on_gpus and feature in ("transformer_engine", "transformer_engine_torch", "nvidia_ml")
    )
    problem = requirements.problem(feature, installed)
    if installed is None:
        means = f"{requirement.without}; {requirement.install}"
        return Row(name, None, requirement.known, "unfit" if needed else "missing", means)
    if problem is not None:
        return Row(name, installed, requirement.known, "unfit" if needed else "other", f"{problem.rule}")
    return _compared(name, installed, requirement.known, "not the version that everything was checked with")


def _compared(name: str, installed: str, known: str, otherwise: str) -> Row:
    if not known:
        return Row(name, installed, "", "there", "no version was checked")
    same = _same(installed, known)
    return Row(name, installed, known, "known" if same else "other", "" if same else otherwise)


def _same(installed: str, known: str) -> bool:
    """Whether a version is the known one, down to as many numbers as that has; a build's own suffix does not count."""
    try:
        numbers = Version(known).release
        return Version(installed).release[: len(numbers)] == numbers and not Version(installed).is_prerelease
    except InvalidVersion:
        return False


def _cuda(here: machine.Machine, on_gpus: bool) -> list[Row]:
    """CUDA as torch was built with it, the driver, NCCL."""
    cuda, driver = cuda_of_torch(), here.driver
    found = []
    if cuda is None:
        found.append(
            Row(
                "CUDA of torch", None, _KNOWN_CUDA, "unfit" if on_gpus else "missing", "torch computes on the CPU alone"
            )
        )
    else:
        found.append(_compared("CUDA of torch", cuda, _KNOWN_CUDA, "Transformer Engine must be built with the same"))
    if driver is None:
        found.append(Row("driver", None, "", "missing", "; ".join(here.notes) or "no GPU can be used"))
    else:
        major = driver.partition(".")[0]
        old = cuda is not None and cuda.startswith("13") and major.isdecimal() and int(major) < _LEAST_DRIVER
        means = f"CUDA {cuda} needs {_LEAST_DRIVER} or newer, or NVIDIA's compatibility package" if old else ""
        found.append(Row("driver", driver, "", "unfit" if old and on_gpus else "there", means))
    nccl = nccl_version()
    if nccl is None:
        found.append(
            Row("NCCL", None, _KNOWN_NCCL, "unfit" if on_gpus else "missing", "GPUs cannot talk to each other")
        )
    else:
        found.append(_compared("NCCL", nccl, _KNOWN_NCCL, "every node must have the same; tuning differs by version"))
    return found


def cuda_of_torch() -> str | None:
    """The CUDA that torch was built with, read from its `version.py`; None for a build without, or no torch."""
    spec = util.find_spec("torch")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / "version.py"
        match = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", path.read_text() if path.exists() else "", re.MULTILINE)
        if match:
            return match[1]
    return None


def nccl_version() -> str | None:
    """NCCL's version: of the package that torch brings, or of the system's library."""
    for distribution in metadata.distributions():
        if re.fullmatch(r"nvidia[-_]nccl[-_]cu\d+", distribution.name or ""):
            return distribution.version
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def _foreign_apex() -> Iterable[Row]:
    """PyPI's `apex`, a web toolkit: it stands where NVIDIA's would be."""
    try:
        installed = metadata.version("apex")
    except metadata.PackageNotFoundError:
        return
    if requirements.version("apex") is None:
        means = "not NVIDIA's, or NVIDIA's without its extensions: it is not used; uninstall it"
        yield Row("another apex", installed, "", "other", means)


def _programs() -> list[Row]:
    """Slurm and what runs containers."""
    slurm = _said(["srun", "--version"], r"([\d.]+)")
    enroot, apptainer = _said(["enroot", "version"], r"([\d.]+)"), _said(["apptainer", "--version"], r"([\d.]+)")
    pyxis = "there" if slurm and _said(["srun", "--help"], r"(--container-image)") else None
    if slurm is not None:
        found = [_compared("Slurm", slurm, _KNOWN_SLURM, "submit was tried with another version")]
    elif shutil.which("srun"):
        found = [
            Row("Slurm", "unknown", _KNOWN_SLURM, "other", "srun finds no configuration: no cluster is joined here")
        ]
    else:
        found = [Row("Slurm", None, _KNOWN_SLURM, "missing", "submit does not work here; go to a login node")]
    without: Sequence[tuple[str, str | None, str]] = (
        ("Pyxis", pyxis, "cluster.container=pyxis does not work"),
        ("Enroot", enroot, "Pyxis needs it on the nodes"),
        ("Apptainer", apptainer, "cluster.container=apptainer does not work"),
    )
    for name, installed, means in without:
        found.append(Row(name, installed, "", "there" if installed else "missing", "" if installed else means))
    return found


def _said(command: Sequence[str], pattern: str) -> str | None:
    """What a program says of itself; None where it is not there or does not answer."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_PROGRAM_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(pattern, done.stdout)
    return match[1] if match else None


def _show(found: Sequence[Row], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("what", "installed", "known to work", "what it means"):
        table.add_column(column, overflow="fold")
    for row in found:
        installed = Text(row.installed or "-", style=_STYLES[row.state])
        table.add_row(row.name, installed, row.known or "-", Text(row.means))
    console.print(table)
