"""Which nodes a preflight calls unfit: by findings, against the baseline and each other, and by their silence."""

import json
from pathlib import Path

import pytest

from shardwright.conf.problems import RefusedError
from shardwright.pretrain import preflight_groups as groups
from shardwright.pretrain.preflight_report import Report
from shardwright.pretrain.preflight_results import (
    BAD,
    OK,
    WARNING,
    Baseline,
    Finding,
    Node,
    RankResult,
    compare,
    judge_group,
    name_missing,
    nodes_of,
    short,
)

FAST, SLOW = 600.0, 400.0


def of_rank(rank: int, node: str, device: str = "H200", **findings: Finding) -> RankResult:
    return RankResult(rank=rank, node=node, device=device, findings=findings)


def nodes_with(*tflops: float) -> dict[str, Node]:
    """Nodes n0, n1, ..., that found nothing but how fast they are."""
    rates = [Finding(OK, "", {"gemm_tflops": value}) for value in tflops]
    return nodes_of(of_rank(number, f"n{number}", gemm=rate) for number, rate in enumerate(rates))


def bad(nodes: dict[str, Node]) -> dict[str, list[str]]:
    return Report(nodes=nodes, num_ranks=len(nodes)).bad_nodes


def test_a_node_slower_than_a_fraction_of_the_median_is_bad_and_its_reason_says_by_how_much() -> None:
    nodes = nodes_with(FAST, SLOW, FAST, FAST)
    compare(nodes, None, 0.8)
    assert bad(nodes) == {"n1": ["gemm: gemm_tflops 400 is 67% of the nodes' median 600"]}
    nodes = nodes_with(FAST, SLOW, FAST, FAST)
    compare(nodes, None, 0.5)
    assert bad(nodes) == {}


def test_two_nodes_have_no_median_that_could_blame_one() -> None:
    nodes = nodes_with(FAST, SLOW / 10)
    compare(nodes, None, 0.8)
    assert bad(nodes) == {}


def test_the_slow_disk_of_one_node_is_judged_by_the_baseline_alone() -> None:
    rates = [1.0, 0.1, 1.0, 1.0]
    found = [Finding(OK, "", {"disk_write_gb_per_second": rate}) for rate in rates]
    nodes = nodes_of(of_rank(number, f"n{number}", disk=finding) for number, finding in enumerate(found))
    compare(nodes, None, 0.8)
    assert bad(nodes) == {}
    compare(nodes, Baseline(device="H200", rates={"disk_write_gb_per_second": 1.0}, counts={}), 0.8)
    assert list(bad(nodes)) == ["n1"]


def test_one_node_alone_is_judged_by_the_baseline() -> None:
    baseline = Baseline(device="H200", rates={"gemm_tflops": FAST}, counts={"gpus": 8})
    nodes = nodes_with(SLOW)
    nodes["n0"].add("gpus", Finding(OK, counts={"gpus": 7}))
    compare(nodes, baseline, 0.8)
    assert bad(nodes)["n0"] == [
        "gpus: gpus 7, the baseline has 8",
        "gemm: gemm_tflops 400 is 67% of the baseline's 600",
    ]
    nodes = nodes_with(FAST)
    compare(nodes, Baseline(device="B200", rates={}, counts={}), 0.8)
    assert bad(nodes) == {"n0": ["gpus: computes on H200, the baseline on B200"]}


def test_of_two_nodes_the_one_with_fewer_gpus_is_bad() -> None:
    nodes = nodes_of(of_rank(rank, f"n{rank}", gpus=Finding(OK, counts={"gpus": 8 - rank})) for rank in range(2))
    compare(nodes, None, 0.8)
    assert bad(nodes) == {"n1": ["gpus: gpus 7, other nodes have 8"]}


def test_a_node_whose_gpus_torch_does_not_see_is_bad_beside_others() -> None:
    nodes = nodes_of([of_rank(0, "n0", gemm=Finding(OK)), of_rank(1, "n1", device="cpu", gemm=Finding(OK))])
    compare(nodes, None, 0.8)
    assert bad(nodes) == {"n1": ["gpus: computes on cpu, other nodes on H200"]}


def test_a_node_is_as_good_as_the_worst_of_its_ranks() -> None:
    nodes = nodes_of(
        [
            of_rank(1, "n0", gemm=Finding(BAD, "cuda:1: wrong", {})),
            of_rank(0, "n0", gemm=Finding(OK, "", {"gemm_tflops": FAST})),
            of_rank(2, "n1", gemm=Finding(OK, "", {"gemm_tflops": FAST})),
            of_rank(3, "n1", gemm=Finding(WARNING, "warm", {"gemm_tflops": SLOW})),
        ]
    )
    assert nodes["n0"].ranks == [0, 1]
    assert bad(nodes) == {"n0": ["gemm: cuda:1: wrong"]}
    assert nodes["n1"].findings["gemm"] == Finding(WARNING, "warm", {"gemm_tflops": SLOW})


def test_nodes_that_sent_nothing_are_named_from_slurm_s_list() -> None:
    nodes = nodes_of([of_rank(0, "n1"), of_rank(1, "n1"), of_rank(2, "n2")])
    name_missing(nodes, [0, 1, 2], 6, {"n1": 2, "n2": 2, "n3": 2}, "no answer")
    assert bad(nodes) == {"n2": ["answer: no answer of 1 of its 2 ranks"], "n3": ["answer: no answer"]}


def test_without_slurm_s_list_missing_ranks_are_named() -> None:
    nodes = nodes_of([of_rank(0, "host")])
    name_missing(nodes, [0], 2, {}, "no answer")
    assert bad(nodes) == {"rank 1": ["answer: no answer"]}


def test_a_baseline_is_the_medians_of_fit_nodes_and_reads_back(tmp_path: Path) -> None:
    nodes = nodes_with(500, FAST, 700)
    nodes["n0"].add("gpus", Finding(OK, counts={"gpus": 8}))
    baseline = Baseline.of(list(nodes.values()), Finding(OK, "", {"all_reduce_bus_gb_per_second": 360.0}))
    (tmp_path / "file").write_text(baseline.text())
    assert Baseline.read(tmp_path / "file") == baseline
    assert baseline.rates == {"gemm_tflops": FAST, "all_reduce_bus_gb_per_second": 360.0}
    assert (baseline.device, baseline.counts) == ("H200", {"gpus": 8})


@pytest.mark.parametrize(
    "content", [None, "no json", "[]", '{"device": "cpu"}', '{"device": 1, "rates": 3, "counts": 0}']
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RefusedError, match="--baseline"):
        Baseline.read(path)


def test_a_slow_all_reduce_makes_the_whole_unfit_and_blames_no_node() -> None:
    measured = Finding(OK, "16 ranks", {"all_reduce_bus_gb_per_second": 100.0})
    baseline = Baseline(device="H200", rates={"all_reduce_bus_gb_per_second": 400.0}, counts={})
    group = judge_group(measured, baseline, 0.8)
    report = Report(nodes=nodes_with(FAST), num_ranks=1, group=group)
    assert (report.fit, report.bad_nodes) == (False, {})
    assert "25% of the baseline's" in group.detail
    assert judge_group(measured, None, 0.8) == measured


def test_a_report_names_bad_nodes_as_slurm_excludes_them() -> None:
    nodes = nodes_with(FAST, SLOW, FAST, FAST)
    compare(nodes, None, 0.8)
    told = json.loads(json.dumps(Report(nodes=nodes, num_ranks=4, launch_id="slurm 7.0, restart 0").as_json()))
    assert (told["fit"], told["exclude"]) == (False, "n1")
    assert [bad["node"] for bad in told["bad_nodes"]] == ["n1"]
    assert told["nodes"]["n1"]["checks"]["gemm"]["rates"] == {"gemm_tflops": SLOW}


def test_names_of_nodes_are_shown_as_slurm_writes_them() -> None:
    assert short(["n1", "n2", "n3", "n7"]) == "n[1-3,7]"
    assert short(["node01", "login"]) == "node01,login"


@pytest.mark.parametrize("count", range(1, 8))
def test_every_node_meets_both_its_neighbours_and_never_two_at_once(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    rounds = groups.rounds(names)
    pairs = [pair for pairs in rounds.values() for pair in pairs]
    ring = {frozenset((names[place], names[(place + 1) % count])) for place in range(count)} if count > 1 else set()
    assert {frozenset(pair) for pair in pairs} == ring and len(pairs) == len(ring)
    for met in rounds.values():
        in_round = [name for pair in met for name in pair]
        assert len(in_round) == len(set(in_round))
    assert len(rounds) <= 3


def test_ranks_meet_the_ranks_of_the_same_number_on_the_other_node() -> None:
    assert groups.stages({"a": [0, 1], "b": [2, 3]}) == {"in_node": [[0, 1], [2, 3]], "neighbours_0": [[0, 2], [1, 3]]}
    assert groups.stages({"a": [0]}) == {}


@pytest.mark.parametrize(
    ("worked", "lost", "blamed"),
    [
        ({("a", "b"): True, ("b", "c"): False, ("c", "d"): False, ("d", "a"): True}, set(), {"c"}),
        ({("a", "b"): False}, set(), {"a", "b"}),
        ({("a", "b"): False}, {"b"}, set()),
        ({("a", "b"): False, ("b", "c"): False, ("c", "a"): True}, {"b"}, set()),
        ({("a", "b"): False, ("b", "c"): True, ("c", "d"): True, ("d", "a"): True}, set(), {"a", "b"}),
        ({("a", "b"): True, ("b", "c"): True, ("c", "a"): True}, set(), set()),
    ],
)
def test_pairs_tell_which_node_is_to_blame(
    worked: dict[tuple[str, str], bool], lost: set[str], blamed: set[str]
) -> None:
    assert set(groups.blame(worked, lost)) == blamed
