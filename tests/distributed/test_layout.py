"""`Layout` against megatron-core's own generator of groups: the same ranks in the same groups, for any sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from shardwright.conf.problems import RefusedError
from shardwright.parallel.layout import Layout

ORDER = "tp-cp-ep-dp-pp"
"""Of `initialize_model_parallel`."""
sizes = st.sampled_from([1, 2, 3])


@given(sizes, sizes, sizes, sizes, st.sampled_from(["tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp-cp"]))
def test_dense_groups_are_megatron_core_s(tp: int, cp: int, dp: int, pp: int, axes: str) -> None:
    layout = Layout(world_size=tp * cp * dp * pp, tp=tp, cp=cp, pp=pp)
    theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER).get_ranks(axes)
    assert sorted(layout.groups(axes)) == sorted(map(tuple, theirs))


@given(sizes, sizes, sizes, sizes, st.sampled_from([("ep", "ep"), ("etp", "tp"), ("edp", "dp"), ("etp-ep", "tp-ep")]))
def test_expert_groups_are_megatron_core_s(etp: int, ep: int, edp: int, pp: int, axes: tuple[str, str]) -> None:
    layout = Layout(world_size=etp * ep * edp * pp, etp=etp, ep=ep, pp=pp)
    theirs = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=ORDER).get_ranks(axes[1])
    assert sorted(layout.groups(axes[0])) == sorted(map(tuple, theirs))


@given(sizes, sizes, sizes, sizes)
def test_ranks_of_a_group_differ_on_its_axis_alone(tp: int, cp: int, dp: int, pp: int) -> None:
    layout = Layout(world_size=tp * cp * dp * pp, tp=tp, cp=cp, pp=pp)
    for group in layout.groups("dp"):
        places = [layout.coordinates(rank) for rank in group]
        assert [place.dp for place in places] == list(range(dp))
        assert len({(place.tp, place.cp, place.pp) for place in places}) == 1


def test_a_world_that_the_axes_do_not_fill_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"parallel\.tp \* parallel\.pp=6: does not divide the 8 ranks"):
        Layout(world_size=8, tp=2, pp=3)
