"""The rows that meet all pairs of choices: few, and running ones wherever the rules leave one."""

import itertools

from ..combinations import Row, all_pairs, pairs_of

FACTORS = {"a": ["1", "2", "3"], "b": ["1", "2"], "c": ["1", "2", "3"], "d": ["1", "2"]}
EVERY = {pair for row in itertools.product(*FACTORS.values()) for pair in pairs_of(row)}


def no_two(row: Row) -> bool:
    """A rule that refuses one pair."""
    return not (row[0] == "2" and row[1] == "2")


def test_a_pair_is_met_by_a_row_that_runs_if_there_is_one() -> None:
    rows = all_pairs(FACTORS, no_two)
    running = {pair for row in rows if no_two(row) for pair in pairs_of(row)}
    assert EVERY - running == {((0, "2"), (1, "2"))}
    assert {pair for row in rows for pair in pairs_of(row)} == EVERY


def test_few_rows_meet_all_pairs() -> None:
    assert len(all_pairs(FACTORS, lambda row: True)) <= 3 * 3 + 1
