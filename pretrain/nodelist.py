"""Slurm's short form of host names, written out: `nodeB[001,003-005]` is nodeB001, nodeB003, nodeB004, nodeB005.

Parsed here and not by `scontrol show hostnames`, which compute containers do not have. Source: Slurm's hostlist syntax
(slurm/src/common/hostlist.c): ranges keep their leading zeros, a name may hold several brackets.
"""

import itertools
import re

from shardwright.conf.problems import Problem, RefusedError

_NAME = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(nodelist: str, *, variable: str = "SLURM_JOB_NODELIST") -> list[str]:
    """All host names of `nodelist`, in its order.

    Args:
        nodelist: Slurm's short form.
        variable: where it comes from, for the error.

    Raises:
        RefusedError: it is empty or not of that form.
    """
    names: list[str] = []
    position = 0
    while position <= len(nodelist):
        match = _NAME.match(nodelist, position)
        if match is None or (match.end() < len(nodelist) and nodelist[match.end()] != ","):
            raise _refusal(nodelist, variable)
        names.extend(_expand_name(match.group(), nodelist, variable))
        position = match.end() + 1
    return names


def _expand_name(name: str, nodelist: str, variable: str) -> list[str]:
    """One comma-separated part: every combination of its brackets, the last one varying fastest."""
    choices: list[list[str]] = []
    for index, part in enumerate(re.split(r"\[([^\]]*)\]", name)):
        choices.append(
            [part] if index % 2 == 0 else [n for r in part.split(",") for n in _range(r, nodelist, variable)]
        )
    return ["".join(parts) for parts in itertools.product(*choices)]


def _range(text: str, nodelist: str, variable: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise _refusal(nodelist, variable)
    first, last = match[1], match[2] or match[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _refusal(nodelist: str, variable: str) -> RefusedError:
    rule = "is not a list of host names in Slurm's form, such as node[01-04,07]"
    return RefusedError([Problem(key=variable, value=nodelist, rule=rule)])
