"""How bad input is reported: every broken rule becomes a `Problem`, all of them leave in ONE error.

Functions that judge input return lists of problems instead of raising, so that a user who made three mistakes reads of
three. The command line turns a `RefusedError` into exit code 2 and prints no traceback.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One broken rule: which key, what it holds, what is wrong, what would work."""

    key: str
    """Dotted config key (`parallel.tp`), environment variable or path that the user can change."""
    value: object = None
    """What it holds now; None where there is no value to show."""
    rule: str
    """The rule that it breaks, as a full sentence without the final period."""
    remedy: str = ""
    """Nearest values or actions that work; empty where there is nothing useful to say."""

    def __str__(self) -> str:
        text = f"{self.key}: {self.rule}" if self.value is None else f"{self.key}={self.value}: {self.rule}"
        return f"{text}; {self.remedy}" if self.remedy else text


class RefusedError(ValueError):
    """Input that cannot be run (exit code 2): all problems found, in one message."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "refused: 1 problem" if count == 1 else f"refused: {count} problems"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


def refuse(problems: Sequence[Problem]) -> None:
    """Raise one `RefusedError` with all problems; return where there are none."""
    if problems:
        raise RefusedError(problems)
