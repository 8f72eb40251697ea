"""What a person sees of a run, drawn from its rows alone: the same rows always give the same picture.

On a terminal: a spinner with the phase until the first step, then a progress bar with loss, speed and the time left;
one table at the start, one at the end, events as lines above the bar. Elsewhere: plain lines, one each `log_interval`
steps. The display starts no thread (it is redrawn by rows and by `tick`), and the cursor stays visible, so that even a
launcher that is killed leaves the terminal usable. Text from configurations and errors is never read as markup.
"""

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shardwright.pretrain import summary
from shardwright.pretrain.events import Row
from shardwright.pretrain.faults import REFUSED
from shardwright.pretrain.summary import Facts

_ETA_STEPS = 20
"""The time left is judged by the median of this many steps."""
_LEAST_BAR, _TEXT_BESIDE_BAR = 10, 62
"""Columns. The bar's line stays shorter than the terminal, so that a `^C` echoed behind it does not start a new one."""

_STATES = {
    "done": ("finished", "green"),
    "stopped": ("stopped after saving", "yellow"),
    "failed": ("failed", "red"),
}


class Display:
    """Shows the rows of one attempt.

    Args:
        console: where to.
        interactive: whether a person looks at a terminal that can redraw a line.
        log_interval: steps between two lines where it is not interactive.
        changes: keys in which this attempt differs from the run's frozen configuration; who goes on repeats them.
    """

    def __init__(
        self, console: Console, *, interactive: bool, log_interval: int, changes: Mapping[str, str] | None = None
    ) -> None:
        self._changes = dict(changes or {})
        self._console, self._interactive, self._log_interval = console, interactive, log_interval
        self._live: Progress | None = None
        self._start: dict[str, Any] = {}
        self._first: Row | None = None
        self._last: Row | None = None
        self._validation: float | None = None
        self._checkpoint: str | None = None
        self._seconds: deque[float] = deque(maxlen=_ETA_STEPS)
        self._show: dict[str, Callable[[int | None, dict[str, Any]], None]] = {
            "phase": self._on_phase,
            "start": self._on_start,
            "resume": self._on_resume,
            "no_checkpoint": self._on_no_checkpoint,
            "eval": self._on_eval,
            "checkpoint": self._on_checkpoint,
            "checkpoint_damaged": self._on_checkpoint_damaged,
            "checkpoint_verified": self._on_checkpoint_verified,
            "straggler": self._on_straggler,
            "fp8_guard": self._on_fp8_guard,
            "rollback": self._on_rollback,
            "rollback_impossible": self._on_rollback_impossible,
            "non_finite_amax": self._on_non_finite_amax,
            "stop_requested": self._on_stop_requested,
            "notice_too_short": self._on_notice_too_short,
            "fault": self._on_fault,
            "end": self._on_end,
        }

    @property
    def step(self) -> int | None:
        """The last step that was shown."""
        return None if self._last is None else self._last["step"]

    def event(self, row: Row) -> None:
        """Show an event; kinds that nobody needs to see are passed over."""
        show = self._show.get(row["kind"])
        if show is not None:
            show(row["step"], row["data"])

    def metrics(self, row: Row) -> None:
        """Show a step."""
        self._first = self._first or row
        self._last = row
        if row.get("step_seconds"):
            self._seconds.append(row["step_seconds"])
        step, total = row["step"], self._start.get("train_iters")
        if self._interactive:
            if self._first is row:
                self._open_bar(total, step)
            assert self._live is not None
            loss, speed, eta = summary.number(row["loss"]), self._speed(row), self._eta()
            if row.get("bf16_layers"):
                loss += f" ({row['bf16_layers']} in BF16)"
            self._live.update(self._live.task_ids[0], completed=step, refresh=True, loss=loss, speed=speed, eta=eta)
        elif step % self._log_interval == 0 or step == total or self._first is row:
            parts = [f"step {step}{f'/{total}' if total else ''}", f"loss {summary.number(row['loss'])}"]
            parts += [f"grad norm {summary.number(row['grad_norm'], 3)}", f"lr {row['lr']:.3g}"] if row["lr"] else []
            if row.get("bf16_layers"):
                parts.append(f"{row['bf16_layers']} layers in BF16")
            self._line("  ".join([*parts, self._speed(row), f"{self._eta()} left"]))

    def note(self, text: str) -> None:
        """Say something that is no event."""
        self._line(text, "dim")

    def table(self, title: str, facts: Facts, color: str) -> None:
        """Show labelled texts under a title."""
        if not self._interactive:
            width = max(len(label) for label, _ in facts) + 2
            self._line(title)
            for label, text in facts:
                self._line(f"  {label:<{width}}" + text.replace("\n", "\n" + " " * (width + 2)))
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style=color, no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in facts:
            table.add_row(label, Text(text))
        heading = Text(title, style=f"bold {color}")
        self._console.print(Panel(table, title=heading, title_align="left", border_style=color, expand=False))

    def tick(self) -> None:
        """Let the spinner and the clock move; call a few times a second."""
        if self._live is not None:
            self._live.refresh()

    def close(self) -> None:
        """Leave the terminal as it was; may be called at any time and more than once."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _on_phase(self, step: int | None, data: dict[str, Any]) -> None:
        if not self._interactive:
            self._line(data["phase"])
        elif self._last is None:
            if self._live is None:
                self._open(
                    Progress(*self._spinner_columns(), console=self._console, auto_refresh=False, transient=True)
                )
            assert self._live is not None
            for task in self._live.task_ids:
                self._live.remove_task(task)
            self._live.add_task(data["phase"], total=None)
            self._live.refresh()

    def _on_start(self, step: int | None, data: dict[str, Any]) -> None:
        self._start = data
        run = data.get("run", {})
        title = f"{run.get('name')}  {run.get('dir')}  attempt {run.get('attempt')}"
        self.table(title, summary.start_facts(data), "cyan")

    def _on_resume(self, step: int | None, data: dict[str, Any]) -> None:
        self._line(f"continues after step {step} from {data['path']}", "green")

    def _on_no_checkpoint(self, step: int | None, data: dict[str, Any]) -> None:
        self._line(f"no checkpoint in {data['folder']}: starts at step 0")

    def _on_eval(self, step: int | None, data: dict[str, Any]) -> None:
        self._validation = data["loss"]
        self._line(f"step {step}  validation loss {summary.number(data['loss'])}", "bold")

    def _on_checkpoint(self, step: int | None, data: dict[str, Any]) -> None:
        self._checkpoint = data["path"]
        details = f"{summary.size(data.get('bytes'))}, {summary.number(data.get('seconds'), 1)} s"
        if data.get("asynchronous"):
            details += f", training waited {summary.number(data.get('stall_seconds'), 1)} s"
        self._line(f"step {step}  checkpoint {data['path']} ({details})", "dim")

    def _on_checkpoint_damaged(self, step: int | None, data: dict[str, Any]) -> None:
        self._line(f"step {step}  checkpoint {data['path']} is damaged: {data['reason']}", "red")

    def _on_checkpoint_verified(self, step: int | None, data: dict[str, Any]) -> None:
        details = f"{summary.size(data.get('bytes'))}, {summary.number(data.get('seconds'), 1)} s"
        self._line(f"step {step}  checkpoint {data['path']} is whole ({details})", "dim")

    def _on_notice_too_short(self, step: int | None, data: dict[str, Any]) -> None:
        needs, has = data["needed"], data["given"]
        text = (
            f"a stop takes up to {needs:.0f} s, more than cluster.signal_seconds={has}: a preemption may cut it short"
        )
        self._line(text, "yellow")

    def _on_straggler(self, step: int | None, data: dict[str, Any]) -> None:
        named = ", ".join(f"{rank} on {host}" for rank, host in zip(data["ranks"], data["hosts"], strict=True))
        lost = f"{summary.number(data['lost_seconds'], 3)} s, {data['share']:.0%} of a step"
        self._line(f"step {step}  slow: rank {named}; the others wait {lost}", "yellow")

    def _on_rollback(self, step: int | None, data: dict[str, Any]) -> None:
        loss, mean = summary.number(data["loss"]), summary.number(data["mean_loss"])
        text = f"step {step}  loss {loss} after a mean of {mean}: back to step {data['to_step']}, past "
        text += f"{data['skipped_samples']} samples ({data['number']} of at most {data['most']} times)"
        self._line(text, "yellow")

    def _on_rollback_impossible(self, step: int | None, data: dict[str, Any]) -> None:
        self._line(f"step {step}  cannot go back: {data['reason']}", "yellow")

    def _on_fp8_guard(self, step: int | None, data: dict[str, Any]) -> None:
        moves = [("to BF16", data["demoted"]), ("back from BF16", data["promoted"])]
        for where, layers in moves:
            if layers:
                more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
                self._line(f"step {step}  {where}: {', '.join(layers[:3])}{more} ({data['reason']})", "yellow")

    def _on_non_finite_amax(self, step: int | None, data: dict[str, Any]) -> None:
        self._line(f"step {step}  {data['reason']}; its scale stays", "yellow")

    def _on_stop_requested(self, step: int | None, data: dict[str, Any]) -> None:
        self._line("asked to stop: saves after the present step; Ctrl-C again ends it at once, unsaved", "yellow")

    def _on_fault(self, step: int | None, data: dict[str, Any]) -> None:
        self.close()
        facts = [("error", data["error"]), ("log", data.get("log") or ""), ("says", data.get("tail") or "")]
        title = f"rank {data['rank']} on {data['host']} failed the run"
        if data["exit_code"] == REFUSED:
            title = f"rank {data['rank']} on {data['host']} cannot begin"
        self.table(title, [(label, text) for label, text in facts if text], "red")

    def _on_end(self, step: int | None, data: dict[str, Any]) -> None:
        self.close()
        words, color = _STATES.get(data["state"], (data["state"], "red"))
        self.table(words, self._end_facts(data), color)

    def _end_facts(self, data: dict[str, Any]) -> Facts:
        facts: Facts = []
        if self._first is not None and self._last is not None:
            first, last = self._first, self._last
            loss = f"{summary.number(first['loss'])} -> {summary.number(last['loss'])}"
            facts.append(("loss", f"{loss} (steps {first['step']} to {last['step']})"))
        if self._validation is not None:
            facts.append(("validation", summary.number(self._validation)))
        if data.get("seconds") is not None:
            facts.append(("time", summary.duration(data["seconds"])))
        folder = self._start.get("run", {}).get("dir")
        if self._checkpoint:
            facts.append(("checkpoint", self._checkpoint))
        if folder:
            facts.append(("run folder", f"{folder} (metrics.jsonl, events.jsonl, attempts/)"))
            total = self._start.get("train_iters")
            if data["state"] == "done" and total:
                longer = {**self._changes, "schedule.train_iters": 2 * total}
                facts.append(("train longer", summary.continue_command(folder, longer)))
            else:
                facts.append(("continue", summary.continue_command(folder, self._changes)))
        return facts

    def _speed(self, row: Row) -> str:
        return f"{summary.count(row['tokens_per_second'])} tokens/s"

    def _eta(self) -> str:
        total = self._start.get("train_iters")
        if not self._seconds or total is None or self._last is None:
            return "-"
        return summary.duration(statistics.median(self._seconds) * max(0, total - self._last["step"]))

    def _open_bar(self, total: int | None, step: int) -> None:
        self.close()
        bar = Progress(
            TextColumn("[cyan]step {task.completed}/{task.total}"),
            BarColumn(bar_width=max(_LEAST_BAR, self._console.width - _TEXT_BESIDE_BAR)),
            TextColumn("loss [bold]{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("[cyan]{task.fields[eta]} left"),
            console=self._console,
            auto_refresh=False,
        )
        bar.add_task("train", total=total, completed=step - 1, loss="-", speed="-", eta="-")
        self._open(bar)

    def _open(self, live: Progress) -> None:
        self._live = live
        live.start()
        self._console.show_cursor(True)

    @staticmethod
    def _spinner_columns() -> tuple[SpinnerColumn, TextColumn, TimeElapsedColumn]:
        return SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style if self._interactive else ""), soft_wrap=not self._interactive)
