"""The words of the tables at a run's start and end: lists of (label, text), the same on a terminal and in a log file.

`display` draws them; a text may have several lines, already aligned, so that nothing has to be laid out twice.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from shardwright.conf.compose import override

Facts = list[tuple[str, str]]

_NUMBER = re.compile(r"-|[\d.]+[kMBT]?")
_BATCH_FIELDS = ("seq_length", "micro_batch_size", "num_microbatches", "global_batch_size", "rampup_batch_size")
_MAP_LINES = 16
"""Lines of the rank map; a larger world is cut, its ranks follow the same order."""


def start_facts(data: Mapping[str, Any]) -> Facts:
    """The start table from the data of a `start` event; what the event does not have is left out."""
    facts: Facts = [
        ("model", _model(data.get("model", {}), data.get("parameters"))),
        ("layout", _layout(data.get("layout", {}))),
        ("precision", _pairs(data.get("precision", {}))),
        ("kernels", "; ".join(f"{name.replace('_', ' ')}: {by}" for name, by in data.get("kernels", {}).items())),
        ("process", ", ".join(f"{name} {value}" for name, value in data.get("process", {}).items())),
        ("memory", _memory(data.get("memory", {}))),
        ("optimizer", _param_groups(data.get("param_groups", []))),
        ("data", _data(data.get("data", {}))),
        ("steps", _steps(data)),
    ]
    return [(label, text) for label, text in facts if text]


def continue_command(folder: object, changes: Mapping[str, object] = MappingProxyType({})) -> str:
    """What a user types to go on with a run, whose frozen configuration has the keys of `changes` otherwise."""
    overrides = [override(key, str(value)) for key, value in {"run.dir": folder, **changes}.items()]
    return f"{_program()} train {shlex.join(overrides)}"


def count(value: float | None) -> str:
    """A number for people: 950, 12.3k, 1.34M, 7B."""
    if value is None:
        return "-"
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.4g}"


def size(num_bytes: float | None) -> str:
    """Bytes for people, in powers of 1024."""
    if num_bytes is None:
        return "-"
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds as 0:01:05."""
    return "-" if seconds is None else str(timedelta(seconds=round(seconds)))


def number(value: object, digits: int = 4) -> str:
    """A float of a row; a dash where it is not known."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def columns(rows: Iterable[Sequence[object]]) -> str:
    """Rows as aligned text, numbers to the right."""
    table = [[("-" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if _NUMBER.fullmatch(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _program() -> str:
    """This program as it was called, where its bare name would not find it (its environment is not active)."""
    called = sys.argv[0]
    return called if called.endswith("/shardwright") and shutil.which("shardwright") != called else "shardwright"


def _model(model: Mapping[str, Any], parameters: int | None) -> str:
    text = _pairs(model)
    return f"{count(parameters)} parameters: {text}" if parameters is not None else text


def _layout(layout: Mapping[str, Any]) -> str:
    """Sizes of the axes, then the rank map: a line per place outside of TP, its TP ranks side by side."""
    if not layout:
        return ""
    axes = " x ".join(f"{axis.upper()}{layout[axis]}" for axis in ("tp", "cp", "dp", "pp") if layout.get(axis, 1) > 1)
    ranks = layout["world_size"]
    head = f"{ranks} ranks = {axes}{', sequence parallel' if layout.get('sp') else ''}" if axes else f"{ranks} rank"
    if layout.get("vpp", 1) > 1:
        head += f", {layout['vpp']} chunks of the model on each stage"
    if layout.get("ep", 1) > 1:
        head += f", experts over EP{layout['ep']} x ETP{layout['etp']}"
    places: dict[tuple[int, int, int], list[str]] = {}
    wheres: dict[tuple[int, int, int], list[str]] = {}
    for rank, _tp, cp, dp, pp, host, device in layout.get("rank_map", []):
        place = (pp, dp, cp)
        places.setdefault(place, []).append(str(rank))
        wheres.setdefault(place, []).append(f"{host} {device}")
    if not places:
        return head
    names = [name for name in ("pp", "dp", "cp") if layout.get(name, 1) > 1]
    title: list[object] = [*names, "ranks" if layout.get("tp", 1) == 1 else "ranks by tp", "where"]
    rows: list[list[object]] = [title]
    for where, members in list(places.items())[:_MAP_LINES]:
        numbers = dict(zip(("pp", "dp", "cp"), where, strict=True))
        rows.append([*(numbers[name] for name in names), " ".join(members), _where(wheres[where])])
    text = f"{head}\n{columns(rows)}"
    hidden = len(places) - _MAP_LINES
    return f"{text}\n... and {hidden} more lines in the same order" if hidden > 0 else text


def _where(places: list[str]) -> str:
    """`node1 cuda:0-3` of single places."""
    by_host: dict[str, list[str]] = {}
    for place in places:
        host, _, device = place.partition(" ")
        by_host.setdefault(host, []).append(device)
    texts = []
    for host, devices in by_host.items():
        short = devices[0] if len(set(devices)) == 1 else f"{devices[0]}-{devices[-1].rpartition(':')[2]}"
        texts.append(f"{host} {short}")
    return ", ".join(texts)


def _pairs(values: Mapping[str, Any]) -> str:
    """`name value` pairs in one line; switches that are off and values that are not set are left out."""
    parts = []
    for name, value in values.items():
        label = name.replace("_", " ")
        if value is None or value is False:
            continue
        if value is True:
            parts.append(label)
        elif isinstance(value, list | tuple):
            parts.append(f"{label} {'/'.join(map(str, value))}")
        else:
            parts.append(f"{label} {value:,}" if isinstance(value, int) and value >= 10_000 else f"{label} {value}")
    return ", ".join(parts)


def _memory(memory: Mapping[str, Any]) -> str:
    parts = [f"{name.removesuffix('_bytes').replace('_', ' ')} {size(value)}" for name, value in memory.items()]
    return f"{', '.join(parts)} per rank" if parts else ""


def _param_groups(groups: Sequence[Mapping[str, Any]]) -> str:
    if not groups:
        return ""
    rows: list[list[object]] = [["parameter group", "by", "on rank 0", "weight decay", "lr x"]]
    rows += [[g["name"], g["optimizer"], count(g["parameters"]), g["weight_decay"], g["lr_mult"]] for g in groups]
    return columns(rows)


def _data(data: Mapping[str, Any]) -> str:
    """What the source holds, how a step takes from it, and where it lies: a line each."""
    held = {name: value for name, value in data.items() if name not in (*_BATCH_FIELDS, "folder") and value != 0}
    taken = {name: data[name] for name in _BATCH_FIELDS if name in data}
    return "\n".join(filter(None, (_pairs(held), _pairs(taken), data.get("folder"))))


def _steps(data: Mapping[str, Any]) -> str:
    if "train_iters" not in data:
        return ""
    first, last = data.get("first_step", 0), data["train_iters"]
    each, left = data.get("tokens_per_step"), data.get("tokens_left")
    text = f"{first} to {last}"
    if each is None or left is None:
        return text
    up_to = "up to " if left < each * (last - first) else ""
    return f"{text}, {up_to}{each:,} tokens each, {count(left)} tokens in all"
