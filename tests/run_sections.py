"""Run the test folders one after another, each in a pytest of its own: what `make test` and `make test-all` do.

Unit tests come first, since they are quick and say most. A folder of its own process matters: the ranks of
`tests/distributed` are forked from a process that hides Transformer Engine, which `tests/gpu` needs. A section that
cannot run here is skipped by name, with what is missing. Every section runs, also after a failed one.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SLURM_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")


def missing(section: str) -> str:
    """Say what a section lacks on this machine, empty if nothing."""
    if not any((TESTS / section).rglob("test_*.py")):
        return "it has no tests yet"
    if section == "slurm":
        absent = [program for program in SLURM_PROGRAMS if not shutil.which(program)]
        return f"{', '.join(absent)} not found; `make slurm-deps` installs Slurm and munge" if absent else ""
    if section == "gpu" and not Path("/proc/driver/nvidia/version").exists():
        return "no NVIDIA driver is loaded"
    return ""


def main() -> int:
    """Run all sections; the exit code is 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--all", action="store_true", help="the tests marked slow too")
    choice = [] if parser.parse_args().all else ["-m", "not slow"]
    # One thread per process: ranks share the cores, and sums come out the same everywhere.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    outcomes: dict[str, str] = {}
    for section in ("unit", "distributed", "slurm", "gpu"):
        print(f"\n=== tests/{section}", flush=True)
        if reason := missing(section):
            outcomes[section] = f"skipped: {reason}"
        else:
            command = [sys.executable, "-m", "pytest", "--no-header", f"tests/{section}", *choice]
            code = subprocess.run(command, cwd=TESTS.parent, env=environment, check=False).returncode
            outcomes[section] = "passed" if code == 0 else f"FAILED (pytest exit code {code})"
        print(f"tests/{section} {outcomes[section]}", flush=True)
    print("\n=== in short")
    for section, outcome in outcomes.items():
        print(f"tests/{section:12} {outcome}")
    return int(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
