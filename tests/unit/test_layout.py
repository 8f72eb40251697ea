"""Where ranks stand, which groups they form, and what stands on one node."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.conf.problems import RefusedError
from shardwright.parallel.layout import EXPERT, GROUPS, Layout

sizes = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any legal layout: both grids fill the same world."""
    tp, cp, pp, dp = draw(sizes), draw(sizes), draw(sizes), draw(sizes)
    inner = tp * cp * dp
    etp = draw(st.sampled_from([size for size in (1, 2, 3, 4) if inner % size == 0]))
    ep = draw(st.sampled_from([size for size in range(1, inner + 1) if inner // etp % size == 0]))
    shared = math.gcd(cp * dp, inner // (etp * ep))
    instances = draw(st.sampled_from([size for size in range(1, shared + 1) if shared % size == 0]))
    return Layout(world_size=inner * pp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, instances=instances)


@settings(deadline=None)
@given(layouts(), st.data())
def test_the_group_of_a_rank_is_the_one_that_holds_it(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    for name in GROUPS:
        holding = [group for group in layout.groups(name) if rank in group]
        assert [layout.group(name, rank)] == (holding or [()])


@settings(deadline=None)
@given(layouts())
def test_every_rank_is_in_one_group_of_each_name(layout: Layout) -> None:
    for name in GROUPS:
        members = [rank for group in layout.groups(name) for rank in group]
        assert len(members) == len(set(members))
        if name not in ("embd", "pos_embd") and (name != "inter_dist_opt" or layout.instances > 1):
            assert sorted(members) == list(range(layout.world_size))


@settings(deadline=None)
@given(layouts())
def test_ranks_of_a_group_differ_on_its_axes_alone(layout: Layout) -> None:
    for name, axes in GROUPS.items():
        if name in ("embd", "pos_embd"):
            continue
        others = [axis for axis in ("tp", "cp", "dp", "pp") if axis not in axes]
        if set(axes) & set(EXPERT[:3]):
            others = [axis for axis in EXPERT if axis not in axes]
        for group in layout.groups(name):
            places = [layout.coordinates(rank) for rank in group]
            assert len({tuple(getattr(place, axis) for axis in axes) for place in places}) == len(group)
            assert len({tuple(getattr(place, axis) for axis in others) for place in places}) == 1


@settings(deadline=None)
@given(layouts())
def test_neighbours_share_the_fastest_axes(layout: Layout) -> None:
    assert layout.group("tp", 0) == tuple(range(layout.tp))
    assert layout.group("tp_ep", 0) == tuple(range(layout.etp * layout.ep))


def test_a_tied_embedding_is_shared_by_the_first_and_the_last_stage() -> None:
    layout = Layout(world_size=8, tp=2, pp=4)
    assert layout.groups("embd") == [(0, 6), (1, 7)]
    assert layout.groups("pos_embd") == [(0,), (1,)]
    assert layout.group("embd", 2) == ()
    assert Layout(world_size=2).groups("embd") == [(0,), (1,)]


@pytest.mark.parametrize(("per_node", "expected"), [(8, 1), (4, 1), (2, 2), (1, 4), (6, 2)])
def test_the_nodes_of_a_group_are_counted(per_node: int, expected: int) -> None:
    assert Layout(world_size=24, tp=4, pp=3).num_nodes("tp", per_node) == expected


def test_a_group_of_distant_ranks_stands_on_as_many_nodes() -> None:
    layout = Layout(world_size=32, tp=4, pp=4, ep=8)
    assert {name: layout.num_nodes(name, 8) for name in ("tp", "ep", "dp", "pp")} == {
        "tp": 1,
        "ep": 1,
        "dp": 1,
        "pp": 4,
    }
    assert Layout(world_size=32, tp=8, pp=2, etp=2, ep=8).num_nodes("ep", 8) == 2


def test_a_world_that_the_axes_do_not_fill_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"parallel\.tp \* parallel\.pp=2 \* 3 = 6: does not divide the 8 ranks"):
        Layout(world_size=8, tp=2, pp=3)


def test_the_default_of_expert_tensor_parallelism_is_spelt_out() -> None:
    (problem,) = Layout.problems(4, tp=2, ep=4)
    assert "parallel.etp * parallel.ep=2 * 4 = 8: does not divide the 4 ranks" in str(problem)
    assert "parallel.etp is parallel.tp=2 by default" in problem.rule
    assert problem.remedy == "cluster.ranks=8 works, or parallel.etp=1"
    assert Layout.problems(4, tp=2, ep=4, etp=1) == []
    mended = Layout(world_size=4, tp=2, ep=4, etp=1)
    assert (mended.dp, mended.edp) == (2, 1)


def test_ranks_that_are_offered_fill_both_grids() -> None:
    found = Layout.problems(10, tp=4, ep=3, etp=1)
    assert [problem.remedy for problem in found] == ["cluster.ranks=12 works"] * 2
    assert Layout.problems(12, tp=4, ep=3, etp=1) == []


def test_instances_of_the_optimizer_share_out_the_ranks_that_repeat_weights() -> None:
    layout = Layout(world_size=16, tp=2, pp=2, ep=2, etp=2, instances=2)
    assert layout.group("intra_dp_cp", 0) == (0, 2)
    assert layout.group("intra_expt_dp", 0) == (0,)
    assert layout.group("inter_dist_opt", 1) == (1, 5)
    assert layout.groups("intra_dist_opt") == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    (problem,) = Layout.problems(16, tp=2, pp=2, ep=2, instances=4)
    assert str(problem) == (
        "parallel.num_distributed_optimizer_instances=4: does not divide the 2 ranks over which dense layers and "
        "experts both repeat their weights; parallel.num_distributed_optimizer_instances=2 works"
    )


def test_a_rank_outside_of_the_world_has_no_place() -> None:
    with pytest.raises(ValueError, match="rank 4 is outside of the world of 4 ranks"):
        Layout(world_size=4).coordinates(4)
