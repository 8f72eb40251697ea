"""What a person sees, drawn from rows into a recorded console."""

import io
import shlex
from typing import Any

import pytest
from rich.console import Console

from shardwright.conf.problems import Problem, RefusedError
from shardwright.pretrain import summary
from shardwright.pretrain.display import Display
from shardwright.pretrain.faults import Failure

START: dict[str, Any] = {
    "run": {"name": "tiny [red]", "dir": "runs/tiny", "attempt": 1},
    "model": {"layers": 4, "hidden_size": 128, "tied": False},
    "parameters": 1_345_000,
    "layout": {
        "world_size": 4,
        "tp": 2,
        "cp": 1,
        "dp": 2,
        "pp": 1,
        "sp": True,
        "rank_map": [[rank, rank % 2, 0, rank // 2, 0, "node1", f"cuda:{rank}"] for rank in range(4)],
    },
    "precision": {"dtype": "bf16", "fp8": None},
    "kernels": {"attention": "flash"},
    "memory": {"weights_bytes": 3 * 2**20},
    "param_groups": [{"name": "norms", "optimizer": "adam", "parameters": 1000, "weight_decay": 0.0, "lr_mult": 1.0}],
    "data": {"source": "mock", "tokens": 4_000_000},
    "train_iters": 30,
    "first_step": 0,
    "tokens_per_step": 2048,
    "tokens_left": 30 * 2048,
}


def event(kind: str, step: int | None = None, **data: Any) -> dict[str, Any]:
    return {"time": "", "attempt": 1, "rank": 0, "kind": kind, "step": step, "data": data}


def metrics(step: int, loss: float | None = None) -> dict[str, Any]:
    row = dict.fromkeys(("lr", "grad_norm", "mfu"))
    return {**row, "step": step, "loss": loss or 4 / step, "tokens_per_second": 12345.0, "step_seconds": 2.0}


def picture(rows: list[dict[str, Any]], *, interactive: bool, log_interval: int = 10) -> str:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=interactive, color_system=None, legacy_windows=False)
    display = Display(console, interactive=interactive, log_interval=log_interval)
    for row in rows:
        (display.event if "kind" in row else display.metrics)(row)
        display.tick()
    display.close()
    return file.getvalue()


RUN = [
    event("phase", phase="building the model"),
    event("start", **START),
    event("no_checkpoint", folder="runs/tiny/checkpoints"),
    *map(metrics, range(1, 16)),
    event("eval", 15, loss=1.25, samples=8),
    *map(metrics, range(16, 31)),
    event("checkpoint", 30, path="runs/tiny/checkpoints/step_00000030", seconds=0.5, bytes=2**21),
    event("end", 30, state="done", seconds=60.0, exit_code=0),
]


def test_without_a_terminal_there_are_plain_lines_at_the_interval() -> None:
    text = picture(RUN, interactive=False)
    assert "\x1b" not in text and "─" not in text
    steps = [line.split()[1] for line in text.splitlines() if line.startswith("step") and "tokens/s" in line]
    assert steps == ["1/30", "10/30", "20/30", "30/30"]
    assert "step 10/30  loss 0.4000  12.3k tokens/s  0:00:40 left" in text


@pytest.mark.parametrize("interactive", [True, False])
def test_the_start_says_what_runs_and_where_each_rank_stands(interactive: bool) -> None:
    text = picture(RUN, interactive=interactive)
    for part in (
        "tiny [red]",
        "1.34M parameters",
        "4 ranks = TP2 x DP2, sequence parallel",
        "bf16",
        "flash",
        "3.0 MiB",
    ):
        assert part in text
    lines = [" ".join(line.strip("│ ").split()) for line in text.splitlines()]
    assert "0 0 1 node1 cuda:0-1" in lines and "1 2 3 node1 cuda:2-3" in lines
    assert "fp8" not in text and "tied" not in text


@pytest.mark.parametrize("interactive", [True, False])
def test_the_end_says_what_came_out_and_how_to_go_on(interactive: bool) -> None:
    text = picture(RUN, interactive=interactive)
    end = text[text.rindex("finished") :]
    for part in ("4.0000 -> 0.1333", "1.2500", "step_00000030", "shardwright train run.dir=runs/tiny"):
        assert part in end


def test_a_stopped_run_says_the_command_that_continues() -> None:
    text = picture(
        [event("start", **START), event("end", state="stopped", seconds=1.0, exit_code=75)], interactive=False
    )
    assert "stopped after saving" in text
    assert text.splitlines()[-1].split() == ["continue", "shardwright", "train", "run.dir=runs/tiny"]


def test_the_command_that_continues_repeats_what_was_changed() -> None:
    file = io.StringIO()
    changes = {"schedule.train_iters": "30", "run.name": "a b", "data.cache_dir": "a,b"}
    display = Display(Console(file=file, width=100), interactive=False, log_interval=1, changes=changes)
    display.event(event("start", **START))
    display.event(event("end", state="stopped", seconds=1.0, exit_code=75))
    display.event(event("end", state="done", seconds=1.0, exit_code=0))
    for steps in (30, 60):
        words = ["run.dir=runs/tiny", f"schedule.train_iters={steps}", "run.name=a b", "data.cache_dir='a,b'"]
        assert f"shardwright train {shlex.join(words)}" in file.getvalue()


def test_the_command_that_continues_names_a_program_that_is_on_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/shardwright"])
    assert summary.continue_command("runs/a") == ".venv/bin/shardwright train run.dir=runs/a"
    monkeypatch.setattr("shutil.which", lambda name: ".venv/bin/shardwright")
    assert summary.continue_command("runs/a") == "shardwright train run.dir=runs/a"


@pytest.mark.parametrize(
    ("number", "text"), [(525_000, "525k"), (1_235_814_400, "1.24B"), (8.03e12, "8.03T"), (7, "7"), (None, "-")]
)
def test_large_numbers_are_shown_with_three_digits(number: float | None, text: str) -> None:
    assert summary.count(number) == text


def test_on_a_terminal_the_bar_shows_step_loss_speed_and_time_left() -> None:
    last = [line for line in picture(RUN[:-1], interactive=True).splitlines() if "tokens/s" in line][-1]
    for part in ("step 30/30", "loss 0.1333", "12.3k tokens/s", "0:00:00 left"):
        assert part in last


def test_the_cursor_is_visible_whenever_the_display_waits() -> None:
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    for end in (1, 2, 4, len(RUN)):
        text = picture(RUN[:end], interactive=True)
        assert text.rfind(shown) >= text.rfind(hidden)
    unfinished = io.StringIO()
    console = Console(file=unfinished, width=100, force_terminal=True)
    display = Display(console, interactive=True, log_interval=1)
    display.event(RUN[0])
    assert unfinished.getvalue().rfind(shown) > unfinished.getvalue().rfind(hidden)
    display.close()


def test_a_fault_names_the_rank_its_host_its_error_and_its_log() -> None:
    row = event("fault", 3, rank=1, host="node7", error="exit code 7", exit_code=3, log="a/rank_00001.log", tail="boom")
    text = picture([row], interactive=False)
    for part in ("rank 1 on node7", "exit code 7", "a/rank_00001.log", "boom"):
        assert part in text


def test_a_refusal_by_a_rank_is_no_failure_of_it() -> None:
    failure = Failure.of(RefusedError([Problem(key="data.cache_dir", value="x", rule="no room")]), rank=0, host="n")
    text = picture([event("fault", None, **failure.as_event())], interactive=False)
    assert "rank 0 on n cannot begin" in text and "error  refused: 1 problem" in text


def test_a_stop_is_acknowledged_before_it_is_done() -> None:
    assert "asked to stop: saves" in picture([*RUN[:5], event("stop_requested", 2)], interactive=True)


@pytest.mark.parametrize("step", [1, 30])
def test_the_bar_leaves_room_for_an_echoed_interrupt(step: int) -> None:
    lines = picture([RUN[1], metrics(step)], interactive=True).splitlines()
    assert max(len(line.rstrip()) for line in lines if "tokens/s" in line) <= 98


def test_unknown_values_are_dashes_and_a_missing_total_is_no_error() -> None:
    row = {**metrics(1), "loss": None, "tokens_per_second": None, "step_seconds": None}
    assert "loss -  - tokens/s  - left" in picture([row], interactive=False)
    assert "step 1/" in picture([row], interactive=True)


def test_chunks_and_experts_are_named_where_there_are_any() -> None:
    layout = {**START["layout"], "pp": 2, "tp": 1, "sp": False, "vpp": 2, "ep": 2, "etp": 1}
    text = picture([event("start", **{**START, "layout": layout})], interactive=False)
    assert "4 ranks = DP2 x PP2, 2 chunks of the model on each stage, experts over EP2 x ETP1" in " ".join(text.split())
    assert "chunks" not in picture([event("start", **START)], interactive=False)


def test_a_large_world_is_cut_to_a_screen() -> None:
    rank_map = [[rank, 0, 0, rank, 0, f"n{rank // 8}", f"cuda:{rank % 8}"] for rank in range(1024)]
    layout = {"world_size": 1024, "tp": 1, "cp": 1, "dp": 1024, "pp": 1, "sp": False, "rank_map": rank_map}
    text = picture([event("start", **{**START, "layout": layout})], interactive=False)
    assert len(text.splitlines()) < 40
    assert "1008 more lines" in text


def test_a_damaged_checkpoint_is_shown_with_what_is_damaged() -> None:
    damaged = event("checkpoint_damaged", 30, path="runs/tiny/step_00000030", reason="__0_0.distcp is missing")
    whole = event("checkpoint_verified", 15, path="runs/tiny/step_00000015", bytes=2**21, seconds=0.2)
    text = picture([damaged, whole], interactive=False)
    assert "step 30  checkpoint runs/tiny/step_00000030 is damaged: __0_0.distcp is missing" in text
    assert "step 15  checkpoint runs/tiny/step_00000015 is whole (2.0 MiB, 0.2 s)" in text
