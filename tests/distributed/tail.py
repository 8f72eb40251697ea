"""Which cases of a table `make test` runs: one of each kind. The others are its long tail, for `make test-all`."""

from collections.abc import Collection

import pytest
from _pytest.mark.structures import ParameterSet


def long_tail(names: Collection[str], *, quick: Collection[str]) -> list[ParameterSet]:
    """Parameters of a test: those that are not `quick` are marked slow."""
    assert set(quick) <= set(names), f"not in the table: {set(quick) - set(names)}"
    return [pytest.param(name, id=name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]
