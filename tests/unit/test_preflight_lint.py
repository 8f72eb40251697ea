"""Variables that tune or debug are found by name and value, in an environment and in lines of bash."""

import fnmatch

import pytest

from shardwright.pretrain import lint, process


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("NCCL_ALGO", "Ring", "algorithm"),
        ("NCCL_PROTO", "Simple", "protocol"),
        ("NCCL_MIN_NCHANNELS", "32", "SMs"),
        ("NCCL_DEBUG", "INFO", "NCCL_DEBUG=WARN"),
        ("NCCL_IB_DISABLE", "1", "sockets"),
        ("NCCL_IB_QPS_PER_CONNECTION", "4", "fabric"),
        ("NCCL_A_NAME_OF_NEXT_YEAR", "1", "NCCL"),
        ("UCX_TLS", "rc", "UCX"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "every collective"),
        ("CUDA_LAUNCH_BLOCKING", "1", "every kernel"),
    ],
)
def test_a_variable_that_tunes_or_debugs_is_named_with_its_reason(name: str, value: str, word: str) -> None:
    (left,) = lint.left_set({name: value})
    assert str(left).startswith(f"{name}={value}: ") and word in str(left)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "ib0"),
        ("NCCL_IB_HCA", "=mlx5_0"),
        ("NCCL_TOPO_FILE", "/opt/topo.xml"),
        ("NCCL_MNNVL_ENABLE", "1"),
        ("NCCL_DEBUG", "warn"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("PATH", "/usr/bin"),
    ],
)
def test_a_variable_that_describes_the_system_may_stay(name: str, value: str) -> None:
    assert lint.left_set({name: value}) == []


def test_lines_of_bash_are_read_for_what_they_set() -> None:
    lines = [
        "export NCCL_ALGO=Ring UCX_TLS='rc,sm'; A=1",
        "# export NCCL_PROTO=LL",
        "cd /x # NCCL_DEBUG=INFO",
        "unset B",
    ]
    assert lint.assignments(lines) == {"NCCL_ALGO": "Ring", "UCX_TLS": "rc,sm", "A": "1"}


def test_every_rule_can_be_the_first_that_fits() -> None:
    for number, rule in enumerate(lint.RULES):
        name = rule.pattern.replace("*", "X").replace("?", "X")
        assert not any(fnmatch.fnmatchcase(name, earlier.pattern) for earlier in lint.RULES[:number]), rule


def test_what_a_rank_sets_itself_for_deterministic_results_is_not_blamed_on_the_user() -> None:
    (left,) = lint.left_set(dict(process.DETERMINISTIC))
    assert "deterministic_mode" in str(left)
