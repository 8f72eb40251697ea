"""Preflight as two tasks of srun on two nodes: both well, one that never comes, one that is lost on the way, a bad one.

The tasks are forked where torch is imported already; each runs the command as it is typed, with srun's variables.
"""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from shardwright.pretrain import cli, preflight, preflight_torch, rank
from shardwright.pretrain.preflight_results import BAD, Finding

from .harness import RunRanks


class Left(BaseException):
    """The task has left, with this exit code."""


def leave(code: int) -> NoReturn:
    raise Left(code)


def task_of_srun(
    index: int,
    num_ranks: int,
    store: Path,
    port: int,
    words: tuple[str, ...],
    fault: Callable[[], None] | None = None,
    nodes: int = 2,
) -> int | str:
    """One task of two, on the nodes n1 and n2 or both on n1; its exit code."""
    task = int(os.environ.get("FIRST_TASK", "0")) + index
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ |= {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % (2 // nodes)),
        "SLURM_NODEID": str(task * nodes // 2),
        "SLURM_JOB_NODELIST": f"n[1-{nodes}]",
        "SLURMD_NODENAME": f"n{task * nodes // 2 + 1}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    rank.leave = leave  # type: ignore[assignment]
    if fault is not None and task == 1:
        fault()
    try:
        return cli.main(["preflight", "--disk-mib=1", "--free-gib=0", *words])
    except Left as left:
        code: int | str = left.args[0]
        return code


def is_lost_before_the_tests_of_groups() -> None:
    def lost(*arguments: Any) -> NoReturn:
        raise Left("lost")

    preflight._take_part = lost  # type: ignore[assignment]


def computes_wrongly() -> None:
    preflight_torch.gemm = lambda device: Finding(BAD, f"{device}: 3 rows are wrong")


def does_not_get_through() -> None:
    def fails(*arguments: Any, **more: Any) -> NoReturn:
        raise RuntimeError("no route")

    preflight_torch.all_reduce = fails


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


@pytest.fixture
def report(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        content: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
        return content

    return read


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    return (f"--folder={tmp_path}", f"--report={tmp_path / 'report.json'}", "--timeout=20", "--group-timeout=10")


def test_two_nodes_that_are_well_are_fit_and_measured_together(
    run_ranks: RunRanks, port: int, words: tuple[str, ...], tmp_path: Path, report: Callable[[], dict[str, Any]]
) -> None:
    baseline = tmp_path / "baseline.json"
    assert run_ranks(task_of_srun, 2, port, (*words, f"--write-baseline={baseline}")) == [0, 0]
    told = report()
    assert (told["fit"], told["bad_nodes"], told["exclude"], told["num_ranks"]) == (True, [], "", 2)
    assert told["launch_id"] == "slurm 77.0, restart 0"
    assert told["group"]["rates"]["all_reduce_bus_gb_per_second"] > 0
    for name, node in told["nodes"].items():
        assert node["checks"]["neighbours"]["rates"]["pair_bus_gb_per_second"] > 0, name
        assert node["checks"]["gemm"]["rates"]["gemm_tflops"] > 0, name
        assert node["checks"]["disk"]["state"] == "ok", name
    assert list(told["nodes"]) == ["n1", "n2"]
    rates = json.loads(baseline.read_text())["rates"]
    assert {"gemm_tflops", "pair_bus_gb_per_second", "all_reduce_bus_gb_per_second"} <= rates.keys()


def test_two_tasks_of_one_node_are_measured_within_it(
    run_ranks: RunRanks, port: int, words: tuple[str, ...], report: Callable[[], dict[str, Any]]
) -> None:
    assert run_ranks(task_of_srun, 2, port, words, None, 1) == [0, 0]
    (node,) = report()["nodes"].values()
    assert (node["ranks"], node["fit"]) == ([0, 1], True)
    assert node["checks"]["in_node"]["rates"]["in_node_bus_gb_per_second"] > 0
    assert "neighbours" not in node["checks"]


def test_a_node_that_never_comes_is_named(
    run_ranks: RunRanks, port: int, words: tuple[str, ...], report: Callable[[], dict[str, Any]]
) -> None:
    assert run_ranks(task_of_srun, 1, port, (*words, "--timeout=4")) == [5]
    assert report()["bad_nodes"] == [{"node": "n2", "reasons": ["answer: no answer within 4 s"]}]


def test_without_rank_0_the_others_write_the_report_and_name_its_node(
    run_ranks: RunRanks,
    port: int,
    words: tuple[str, ...],
    report: Callable[[], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FIRST_TASK", "1")
    assert run_ranks(task_of_srun, 1, port, (*words, "--timeout=2")) == [5]
    assert (report()["exclude"], report()["fit"]) == ("n1", False)


def test_a_node_that_is_lost_on_the_way_is_named_and_its_neighbour_is_not(
    run_ranks: RunRanks, port: int, words: tuple[str, ...], report: Callable[[], dict[str, Any]]
) -> None:
    limits = ("--timeout=20", "--group-timeout=1")
    assert run_ranks(task_of_srun, 2, port, (*words, *limits), is_lost_before_the_tests_of_groups) == [5, "lost"]
    (bad,) = report()["bad_nodes"]
    assert bad["node"] == "n2" and "no answer any more from rank 1" in bad["reasons"][0]


def test_a_node_that_computes_wrongly_is_named_and_takes_no_part_in_tests_of_groups(
    run_ranks: RunRanks, port: int, words: tuple[str, ...], report: Callable[[], dict[str, Any]]
) -> None:
    assert run_ranks(task_of_srun, 2, port, words, computes_wrongly) == [5, 5]
    told = report()
    assert told["bad_nodes"] == [{"node": "n2", "reasons": ["gemm: cpu: 3 rows are wrong"]}]
    assert told["group"] is None and "neighbours" not in told["nodes"]["n1"]["checks"]


def test_two_nodes_that_cannot_talk_are_both_named(
    run_ranks: RunRanks, port: int, words: tuple[str, ...], report: Callable[[], dict[str, Any]]
) -> None:
    assert run_ranks(task_of_srun, 2, port, (*words, "--group-timeout=2"), does_not_get_through) == [5, 5]
    told = report()
    assert (told["exclude"], told["group"]) == ("n1,n2", None)
    assert "cannot talk to n1" in told["bad_nodes"][1]["reasons"][0]


def test_one_wrong_element_of_a_product_is_seen() -> None:
    random = torch.Generator().manual_seed(1)
    a, b = (preflight_torch._sparse(64, random) for _ in range(2))
    x = torch.randint(1, 8, (64, 1), generator=random)
    product = a @ b
    assert preflight_torch.wrong_rows(product, a, b, x) == 0
    product[5, 7] += 1
    assert preflight_torch.wrong_rows(product, a, b, x) == 1


def test_the_integers_of_the_product_are_exact_in_bf16() -> None:
    random = torch.Generator().manual_seed(preflight_torch._SEED)
    a, b = (preflight_torch._sparse(512, random).double() for _ in range(2))
    assert float((a.abs() @ b.abs()).max()) * 4096 / 512 < 256, "no partial sum of the largest product is above it"
