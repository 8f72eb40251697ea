"""`shardwright preflight` as a job step over two nodes: one table, one report, Slurm's names; a task that hangs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Slurm

COMMAND = ("srun", "-N2", "-n2", "--kill-on-bad-exit=0", "--wait=0")
PREFLIGHT = (sys.executable, "-P", "-m", "shardwright.pretrain", "preflight", "--disk-mib=1", "--free-gib=0")


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The virtual nodes are one machine."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_a_step_over_two_nodes_prints_one_table_with_both_and_writes_the_report(slurm: Slurm, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = (f"--folder={tmp_path}", f"--report={report}")
    done = subprocess.run([*COMMAND, *PREFLIGHT, *words], capture_output=True, text=True, check=False)
    printed = done.stdout
    assert done.returncode == 0, printed + done.stderr
    assert printed.count("preflight of 2 nodes, n[1-2], 2 ranks, on cpu") == 1
    assert "neighbours" in printed and "all_reduce" in printed
    told = json.loads(report.read_text())
    assert (told["fit"], list(told["nodes"])) == (True, ["n1", "n2"])


@pytest.mark.slow
def test_a_node_that_hangs_is_named_as_not_fit_and_stands_in_the_report_under_slurm_s_name(
    slurm: Slurm, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    task = f'[ "$SLURM_PROCID" = 1 ] && exec sleep 600; exec "$@" --report={report} --timeout=20'
    with subprocess.Popen(
        [*COMMAND, "bash", "-c", task, "bash", *PREFLIGHT], stdout=subprocess.PIPE, text=True
    ) as step:
        try:
            slurm.wait_for(report.exists, tmp_path)
            printed = next((line for line in step.stdout or () if "is not fit" in line), "")
        finally:
            step.terminate()  # the hanging task would keep the step; a script says srun --wait=SECONDS
    assert printed == "n2 is not fit: answer: no answer within 20 s\n"
    assert json.loads(report.read_text())["exclude"] == "n2"
