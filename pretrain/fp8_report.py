"""`shardwright fp8 RUN`: what a run's narrow format did to its layers, from fp8.jsonl.

A table of the ten worst operands by what is left of their signal at the last sample, and a page with a heat map for
each number, layers and operands against steps, that needs no network.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.pretrain import requirements
from shardwright.pretrain.events import Row, read_rows
from shardwright.pretrain.folder import RunFolder
from shardwright.pretrain.summary import columns

WORST = 10
OPERANDS = {"x": "activation", "w": "weight", "dy": "gradient"}
MAPS = {
    "sqnr_db": ("signal to quantisation noise, dB", "RdYlGn"),
    "underflow": ("share of elements that become 0", "YlOrRd"),
    "overflow": ("share of elements that saturate", "YlOrRd"),
    "staleness": ("amax over what the delayed scale was made for; above 1 saturates", "RdBu"),
    "amax": ("amax", "Viridis"),
}
"""Column -> title and colours of its heat map."""


def run(folder: Path, *, html: Path | None, as_json: bool, show: Callable[[str], None]) -> int:
    """Show the worst operands of the last sample, and draw the heat maps where a file is named.

    Args:
        folder: the run's.
        html: file to draw into; None for none.
        as_json: show the worst rows as JSON.
        show: prints a text.

    Raises:
        RefusedError: the run has no samples, or the page cannot be drawn.
    """
    rows = read_rows(RunFolder(folder).fp8)
    if not rows:
        rule = "has no samples of a narrow format (fp8.jsonl)"
        remedy = "a run with precision=fp8_delayed writes them each telemetry.fp8_interval steps"
        raise RefusedError([Problem(key="RUN", value=str(folder), rule=rule, remedy=remedy)])
    last = max(row["step"] for row in rows)
    of_last = worst([row for row in rows if row["step"] == last])
    if as_json:
        show(json.dumps(of_last, indent=1))
    else:
        steps = len({row["step"] for row in rows})
        show(f"{steps} samples up to step {last}; worst operands of the last one\n{table(of_last)}")
    if html is not None:
        draw(rows, html)
        if not as_json:
            show(f"heat maps: {html}")
    return 0


def worst(rows: Sequence[Row], number: int = WORST) -> list[Row]:
    """The rows that keep least of their signal, the worst first; rows without any signal are none."""
    known = [row for row in rows if row["sqnr_db"] is not None]
    return sorted(known, key=lambda row: (row["sqnr_db"], row["layer"], row["operand"]))[:number]


def table(rows: Sequence[Row]) -> str:
    """Rows for people."""
    head = ("layer", "operand", "SQNR dB", "underflow", "overflow", "amax", "scale", "staleness", "")
    lines: list[Sequence[object]] = [head]
    for row in rows:
        lines.append(
            (
                row["layer"],
                OPERANDS[row["operand"]],
                _number(row["sqnr_db"]),
                f"{row['underflow']:.2%}",
                f"{row['overflow']:.2%}",
                _number(row["amax"]),
                _number(row["scale"]),
                _number(row["staleness"]),
                "in BF16" if row["bf16"] else "",
            )
        )
    return columns(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def grid(rows: Sequence[Row], column: str) -> tuple[list[int], list[str], list[list[float | None]]]:
    """Steps, names of operands, and a row of values for each operand; None where a sample lacks it."""
    steps = sorted({row["step"] for row in rows})
    places = {step: place for place, step in enumerate(steps)}
    values: dict[str, list[float | None]] = {}
    for row in rows:
        name = f"{row['layer']} {OPERANDS[row['operand']]}"
        values.setdefault(name, [None] * len(steps))[places[row["step"]]] = row[column]
    return steps, list(values), list(values.values())


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the heat maps into one HTML file; a menu chooses among them.

    Raises:
        RefusedError: plotly is missing, or the file cannot be written.
    """
    missing = requirements.problem("plotly", requirements.version("plotly"))
    problems = [missing] if missing else []
    if path.suffix != ".html":
        problems.append(Problem(key="--html", value=path, rule="is no name of an HTML file", remedy="--html fp8.html"))
    refuse(problems)
    from plotly import graph_objects

    maps: list[Any] = []
    for column, (_, colors) in MAPS.items():
        steps, names, values = grid(rows, column)
        x = [str(step) for step in steps]
        maps.append(
            graph_objects.Heatmap(x=x, y=names, z=values, colorscale=colors, visible=not maps, hoverongaps=False)
        )
    buttons = [
        {"label": title, "method": "update", "args": [{"visible": [shown == place for shown in range(len(MAPS))]}]}
        for place, (title, _) in enumerate(MAPS.values())
    ]
    height = max(400, 14 * len({(row["layer"], row["operand"]) for row in rows}) + 160)
    figure = graph_objects.Figure(maps)
    figure.update_layout(
        template="plotly_white",
        height=height,
        xaxis={"title": "step", "type": "category"},
        yaxis={"autorange": "reversed", "automargin": True, "tickfont": {"size": 9}},
        updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}],
    )
    try:
        figure.write_html(path, include_plotlyjs=True)
    except OSError as error:
        raise RefusedError([Problem(key="--html", value=path, rule=f"cannot be written: {error.strerror}")]) from None
