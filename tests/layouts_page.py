"""The page of what was proven: `python -m shardwright.tests.layouts_page` writes it into `docs/parallelism.md`.

It is made of the declarations in `tests/layouts.py` alone; `tests/unit/test_proven_layouts.py` holds the document to
them.
"""

import itertools
import re
from pathlib import Path

from . import layouts
from .layouts import KINDS, UNEQUAL, WAYS

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "parallelism.md"
BEGIN, END = "<!-- proven: written by `make proven` -->", "<!-- proven: end -->"
PROVEN, REFUSED, BY_NATURE, LARGER = "✓", "–", "≠", " "


def page() -> str:
    """The generated part: a table of pairs for each kind of model, and what no table shows."""
    return "\n".join(line for kind in KINDS for line in _section(kind)) + "\n\n" + _by_nature()


def written(text: str) -> str:
    """`text` with the generated part anew."""
    return re.sub(
        f"(?<={re.escape(BEGIN)}\n).*(?={re.escape(END)})", lambda _: f"\n{page()}\n\n", text, flags=re.DOTALL
    )


def _section(kind: str) -> list[str]:
    choices = [(at, name) for at, axis in enumerate(layouts.axes_of(kind).values()) for name in axis if name]
    used = [name for at, name in choices if any(name in case.choices for case in layouts.legal(kind))]
    lines = [
        f"\n### {kind}\n",
        f"{KINDS[kind].what[0].upper()}{KINDS[kind].what[1:]}; up to {KINDS[kind].most_ranks} ranks.\n",
        f"| | {' | '.join(used)} |",
        f"|---|{':-:|' * len(used)}",
    ]
    for place, name in enumerate(used):
        cells = [_cell(kind, name, other) if before <= place else "" for before, other in enumerate(used)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    names = [case.layout for case in layouts.proven(kind)] + list(WAYS.get(kind, ()))
    lines.append(f"\nProven: {'; '.join(f'`{name}`' for name in names)}.")
    return lines


def _cell(kind: str, one: str, other: str) -> str:
    """What is known of a pair of choices; of a choice and itself, of any layout with it."""
    both = {one, other}
    tried = [case for case, _ in layouts.candidates(kind) if both <= set(case.choices)]
    if any(case in layouts.proven(kind) for case in tried):
        return PROVEN
    if any(case in layouts.legal(kind) for case in tried):
        return BY_NATURE
    axis = next(axis for axis in layouts.axes_of(kind).values() if one in axis)
    return REFUSED if tried else LARGER if other not in axis else "·"


def _by_nature() -> str:
    lines = ["### Unequal by nature\n"]
    for unequal in UNEQUAL:
        kinds = " and ".join(f"*{kind}*" for kind in unequal.kinds)
        lines.append(f"- {kinds} with {', '.join(unequal.choices)}: {unequal.reason}.")
    return "\n".join(lines)


def summary() -> str:
    """How many layouts there are, for the person who runs this."""
    proven, legal = (sum(map(len, map(some, KINDS))) for some in (layouts.proven, layouts.legal))
    ways = len(list(itertools.chain.from_iterable(WAYS.values())))
    return f"{proven} of {legal} legal layouts are trained, and {ways} further ways"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
    print(f"{DOCUMENT.name}: {summary()}")
