"""Consoles: what is printed stands as it is, whatever a message of somebody else holds in brackets or colons."""

import sys
from typing import TextIO

from rich.console import Console


def console(width: int | None = None, *, file: TextIO | None = None, stderr: bool = False) -> Console:
    """A console without markup, emoji codes and colouring of numbers.

    Args:
        width: columns where standard output is no terminal; None for rich's own choice.
        file: where it prints; None for standard output.
        stderr: print to standard error instead.
    """
    columns = None if sys.stdout.isatty() else width
    return Console(file=file, stderr=stderr, width=columns, markup=False, emoji=False, highlight=False)
