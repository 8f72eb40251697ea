"""Whole numbers in the short form that people and Slurm read."""

from collections.abc import Iterable


def spans(numbers: Iterable[int]) -> str:
    """`0-3,8` of the ascending numbers 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
