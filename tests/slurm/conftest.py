"""One real Slurm for all tests of this folder: three virtual nodes on this machine, started by `cluster.sh`."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
LIMIT_SECONDS = 240.0
"""After this long a job hangs, and the test fails with what it printed."""
_SCRIPT = Path(__file__).with_name("cluster.sh")


class Slurm:
    """What tests do with the cluster."""

    def shardwright(self, *words: str) -> str:
        """Run a command to its end; what it printed."""
        command = [sys.executable, "-P", "-m", "shardwright.pretrain", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *words: str) -> str:
        """Submit; the job's id."""
        return self.shardwright("submit", *words).split()[1]

    def run(self, *words: str) -> str:
        """One of Slurm's own programs; what it printed."""
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def in_queue(self, job: str) -> bool:
        """Whether a job waits or runs."""
        return job in self.run("squeue", "--noheader", "--format=%F").split()

    def wait_for(self, condition: Callable[[], bool], folder: Path) -> None:
        """Return as soon as `condition` holds; where it does not, fail with the logs of jobs below `folder`."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text() for path in sorted(folder.rglob("slurm-*.log")))
                raise AssertionError(f"took too long:\n{self.run('squeue')}\n{logs}")
            time.sleep(0.1)

    def wait(self, job: str, folder: Path) -> None:
        """Until a job has left the queue."""
        self.wait_for(lambda: not self.in_queue(job), folder)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The cluster; skipped by name where Slurm is missing or may not be started."""
    missing = [program for program in PROGRAMS if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found; `make slurm-deps` installs Slurm and munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd and munged are started as root")
    root = tmp_path_factory.mktemp("cluster")
    for parent in root.parents:  # munged wants to reach its socket
        if parent.stat().st_uid == os.geteuid() and parent.is_relative_to(tmp_path_factory.getbasetemp().parent):
            parent.chmod(0o755)
    root.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(root / "slurm.conf"))
        for name in ("SBATCH_EXPORT", "SLURM_JOB_ID"):
            patch.delenv(name, raising=False)
        started = subprocess.run([_SCRIPT, "start", root, "3"], capture_output=True, text=True, check=False)
        try:
            assert started.returncode == 0, started.stderr
            yield Slurm()
        finally:
            subprocess.run(["scancel", "--user=root"], capture_output=True, check=False)
            subprocess.run([_SCRIPT, "stop", root], check=True)
