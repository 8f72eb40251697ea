"""`Layout` and `Split` against megatron-core's own arithmetic: the same ranks in the same groups, the same layers."""

from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from torch._C._distributed_c10d import FileStore

from shardwright.parallel.layout import GROUPS, Layout
from shardwright.parallel.mcore import groups
from shardwright.parallel.stages import rows

from .harness import RunRanks

ORDER = "tp-cp-ep-dp-pp"
"""Of `initialize_model_parallel`."""
NOT_BUILT = {"hcp", "dp_cp_ag", "expt_dp_ag"}
"""Hierarchical context parallelism, extra communicators: not asked for."""
NO_AXIS = {
    "gtp_remat",
    "expt_gtp_remat",
    "dp_cp_gtp_remat",
    "expt_dp_gtp_remat",
    "tp_ep_pp_with_egtp_remat",
}
"""Groups of an axis that has always one rank here."""


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any legal layout: both grids fill the same world."""
    tp, cp, dp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    inner = tp * cp * dp
    etp = draw(st.sampled_from([size for size in range(1, inner + 1) if inner % size == 0]))
    ep = draw(st.sampled_from([size for size in range(1, inner + 1) if inner // etp % size == 0]))
    return Layout(world_size=inner * pp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


@settings(max_examples=400, deadline=None)
@given(layouts())
def test_every_group_is_megatron_core_s(layout: Layout) -> None:
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=ORDER)
    expert = RankGenerator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=ORDER)
    for name, axes in GROUPS.items():
        if name in ("embd", "pos_embd", "inter_dist_opt"):
            continue
        generator = dense if set(axes) <= {"tp", "cp", "dp", "pp"} else expert
        theirs = generator.get_ranks("-".join(axis.removeprefix("e") if axis != "ep" else axis for axis in axes))
        assert sorted(layout.groups(name)) == sorted(map(tuple, theirs)), name


def groups_in_a_rank(rank: int, num_ranks: int, store: str, layout: Layout) -> dict[str, list[int]]:
    """Members of every group that megatron-core built, by the name of its field."""
    built = groups.start(layout, torch.device("cpu"), rank, 60, FileStore(store, num_ranks)).model
    found: dict[str, Any] = {field.name: getattr(built, field.name) for field in fields(ProcessGroupCollection)}
    # of a group that a rank is not in, torch gives a marker of its own
    absent = (None, dist.GroupMember.NON_GROUP_MEMBER)
    return {name: dist.get_process_group_ranks(group) for name, group in found.items() if group not in absent}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(world_size=4, tp=2, pp=2, etp=2),
        Layout(world_size=4, tp=2, cp=2, ep=4),
        Layout(world_size=4, pp=4, vpp=2),
        Layout(world_size=4, pp=2, instances=2),
        Layout(world_size=4, cp=2, ep=2, instances=2),
    ],
    ids=str,
)
def test_process_groups_are_those_of_the_layout(run_ranks: RunRanks, layout: Layout) -> None:
    for rank, built in enumerate(run_ranks(groups_in_a_rank, 4, layout)):
        assert built.keys() - NO_AXIS - NOT_BUILT <= GROUPS.keys()
        for name in GROUPS.keys() - {"tp_dp"}:
            assert tuple(built.get(name, ())) == layout.group(name, rank), f"{name} of rank {rank}"


LETTERS = st.text("Etm", min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(LETTERS, st.integers(1, 12)), min_size=1, max_size=5))
def test_written_stages_read_as_megatron_core_reads_them(parts: list[tuple[str, int]]) -> None:
    written = "|".join(f"({letters}|)*{times}t*{times},L" for letters, times in parts)
    names = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    theirs = PipelineParallelLayerLayout.parse_str_to_list(written)
    assert rows(written) == ["".join(names[layer.name] for layer in row) for row in theirs]
