"""The one rank that tests of this folder share."""

from collections.abc import Iterator

import pytest

from .one_rank import OneRank


@pytest.fixture(scope="session")
def rank() -> Iterator[OneRank]:
    """This process as the only rank."""
    yield OneRank("cuda")
