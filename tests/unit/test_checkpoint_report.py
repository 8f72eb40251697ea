"""`shardwright checkpoint`: what lies in a folder, told without torch, whoever wrote it and whatever is broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.pretrain import checkpoint_store as store
from shardwright.pretrain import cli

TOLD = {
    "loss": 2.5,
    "validation_loss": None,
    "layout": {"world_size": 4, "tp": 2, "pp": 1, "cp": 1, "ep": 1, "etp": 1},
    "precision": "bf16",
    "versions": {"torch": "2.11.0", "transformer-engine": None},
    "attempt": 3,
    "time": "2026-01-01T00:00:00.000Z",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a whole checkpoint, a damaged one, one that was put aside and one that was never finished."""
    root = tmp_path / "run" / "checkpoints"
    for step in (10, 20, 30):
        temporary = store.begin(root, step)
        (temporary / "__0_0.distcp").write_bytes(b"x" * 5000)
        store.commit(temporary, {**TOLD, "step": step}, {})
    (root / "step_00000020" / "__0_0.distcp").unlink()
    store.supersede(root, 20, attempt=2)
    store.begin(root, 40)
    return tmp_path / "run"


def told(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert cli.main(["checkpoint", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    return out or err


def test_the_list_says_of_each_what_it_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows = told(capsys, "list", run).splitlines()
    assert head.split() == ["step", "loss", "validation", "size", "layout", "precision", "age", "state"]
    assert [row.split()[0] for row in rows] == ["10", "20", "30", "40"]
    assert "2.5000" in rows[0] and "4 ranks TP2" in rows[0] and "bf16" in rows[0] and rows[0].endswith("whole")
    assert rows[1].endswith("damaged: __0_0.distcp is missing")
    assert rows[2].endswith("superseded") and rows[3].endswith("unfinished")


def test_json_holds_the_same_and_more(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(told(capsys, "list", run, "--json"))
    assert [row["state"] for row in rows] == ["whole", "damaged", "superseded", "unfinished"]
    assert rows[0]["layout"] == TOLD["layout"] and rows[0]["versions"]["torch"] == "2.11.0"
    assert rows[0]["age_seconds"] > 0 and rows[0]["num_bytes"] > 5000


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/step_00000010"])
def test_inspect_tells_of_the_newest_whole_one(run: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "inspect", run / where)
    assert "step_00000010" in text and "attempt 3" in text and "torch 2.11.0" in text
    assert "__0_0.distcp" in text and "transformer-engine" not in text
    assert "__0_0.distcp" in json.loads(told(capsys, "inspect", run / where, "--json"))["files"]


def test_a_step_is_inspected_by_name_or_those_that_are_there_are_told(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "damaged: __0_0.distcp is missing" in told(capsys, "inspect", run, "--step", 20)
    assert "it has 10, 20, 30, 40" in told(capsys, "inspect", run, "--step", 11, code=2)


def test_verify_reads_contents_and_ends_with_4_where_one_byte_differs(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "step_00000010: whole" in told(capsys, "verify", run, "--step", 10)
    (run / "checkpoints" / "step_00000010" / "__0_0.distcp").write_bytes(b"x" * 4999 + b"y")
    assert told(capsys, "list", run).splitlines()[1].endswith("whole"), "the list does not read contents"
    assert "__0_0.distcp has other content" in told(capsys, "verify", run, "--step", 10, code=4)
    rows = json.loads(told(capsys, "verify", run, "--json", code=4))
    assert [(row["step"], row["whole"]) for row in rows] == [(10, False), (20, False), (30, True)]


def test_where_there_is_nothing_the_message_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no checkpoint" in told(capsys, "list", tmp_path, code=2)
    assert "is not there" in told(capsys, "verify", tmp_path / "nope", code=2)


def test_looking_at_checkpoints_imports_no_torch(run: Path) -> None:
    program = (
        "import sys; from shardwright.pretrain import cli; "
        f"code = cli.main(['checkpoint', 'verify', {str(run)!r}, '--step', '10']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0
