"""The declared layouts: every pair of choices is proven, refused by a rule, or unequal by its nature with a reason."""

import itertools

import pytest

from .. import layouts, layouts_page
from ..combinations import pairs_of
from ..layouts import KINDS, UNEQUAL


@pytest.mark.parametrize("kind", KINDS)
def test_every_legal_pair_of_choices_is_proven_or_unequal_by_its_nature(kind: str) -> None:
    proven = layouts.pairs(layouts.proven(kind))
    for case in layouts.legal(kind):
        assert case.reason or pairs_of(case.row) <= proven, case.name


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_tried_is_refused_with_a_reason_and_a_remedy(kind: str) -> None:
    refused = {case.name: problems for case, problems in layouts.candidates(kind) if problems}
    assert refused
    for name, problems in refused.items():
        assert all(problem.rule and problem.remedy for problem in problems), name


def test_no_reason_for_being_unequal_is_stale() -> None:
    for unequal in UNEQUAL:
        for kind, choice in itertools.product(unequal.kinds, unequal.choices):
            found = [case for case in layouts.unequal(kind) if choice in case.choices]
            assert any(case.reason == unequal.reason for case in found), f"{kind}: {choice} is no legal layout"


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        *(("dense", pair) for pair in itertools.combinations(("DP2", "TP2", "PP2", "CP2"), 2)),
        *(("dense", ("TP2+SP", other)) for other in ("DP2", "PP2", "PP2+VPP2", "CP2")),
        *(("dense", ("PP2+VPP2", other)) for other in ("DP2", "TP2", "CP2")),
        ("experts", ("EP2", "DP2")),
        ("experts", ("EP2", "PP2")),
        ("experts", ("EP4", "DP4")),
        ("experts", ("TP2+SP", "EP2")),
        ("experts", ("ETP2", "EP2")),
        ("shared experts", ("EP2", "TP2+SP")),
    ],
)
def test_the_pairs_that_people_ask_for_are_among_the_proven(kind: str, choices: tuple[str, ...]) -> None:
    assert any(set(choices) <= set(case.choices) for case in layouts.proven(kind))


def test_few_layouts_meet_all_pairs() -> None:
    for kind in KINDS:
        assert len(layouts.proven(kind)) <= len(layouts.legal(kind))
    assert sum(len(layouts.proven(kind)) for kind in KINDS) < sum(len(layouts.legal(kind)) for kind in KINDS) / 2


def test_the_page_shows_what_is_declared() -> None:
    text = layouts_page.DOCUMENT.read_text()
    assert layouts_page.page() in text, "`make proven` writes it anew"
    assert text == layouts_page.written(text)
