"""Which rank a process is, by the environment that torchrun, srun or nobody gave it."""

import socket

import pytest

from shardwright.conf.compose import compose
from shardwright.conf.problems import RefusedError
from shardwright.pretrain import ranks
from shardwright.pretrain.launch import rank_environ

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[03-04]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SRUN = JOB | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(RefusedError) as caught:
        ranks.detect(environ)
    return str(caught.value)


def test_a_shell_is_no_rank() -> None:
    assert ranks.detect({"PATH": "/bin"}) is None


def test_a_batch_script_is_no_rank_though_slurm_numbers_it_0() -> None:
    assert ranks.detect(JOB) is None


def test_a_shell_in_an_interactive_step_is_no_rank() -> None:
    pty = JOB | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_PTY_PORT": "4000"}
    assert ranks.detect(pty) is None
    assert ranks.detect(JOB | {"SLURM_STEP_ID": str(0xFFFFFFFA)}) is None


def test_torchrun_s_variables_make_a_rank() -> None:
    found = ranks.detect(TORCHRUN)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 2, 1, 2)
    assert (found.launcher, found.master_addr, found.master_port) == ("torchrun", "node1", 29500)


def test_a_restart_by_torchrun_is_another_launch() -> None:
    first = ranks.detect(TORCHRUN | {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0"})
    second = ranks.detect(TORCHRUN | {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1"})
    assert first and second and first.launch_id != second.launch_id


def test_rank_0_serves_the_store_unless_torchrun_s_agent_does() -> None:
    rank_0 = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}
    alone, with_agent = ranks.detect(rank_0), ranks.detect(rank_0 | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert alone and with_agent
    assert alone.serves_store and not with_agent.serves_store


@pytest.mark.parametrize("missing", list(TORCHRUN))
def test_half_of_torchrun_s_variables_is_refused_naming_what_is_missing(missing: str) -> None:
    assert f"{missing}=(missing)" in refusal({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize("missing", [name for name in SRUN if name not in ("SLURM_STEP_ID", "SLURM_PROCID")])
def test_half_of_srun_s_variables_is_refused_naming_what_is_missing(missing: str) -> None:
    assert f"{missing}=(missing)" in refusal({name: value for name, value in SRUN.items() if name != missing})


@pytest.mark.parametrize(("name", "value"), [("RANK", "2"), ("RANK", "-1"), ("RANK", "one"), ("LOCAL_RANK", "2")])
def test_numbers_that_cannot_be_are_refused(name: str, value: str) -> None:
    assert f"{name}={value}" in refusal(TORCHRUN | {name: value})


def test_srun_s_variables_make_a_rank_that_meets_the_others_on_the_first_node() -> None:
    found = ranks.detect(SRUN)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.launcher, found.master_addr) == ("srun", "n03")


def test_srun_s_tasks_per_node_are_read_where_they_differ() -> None:
    environ = SRUN | {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_TASKS_PER_NODE": "2,1(x2),5", "SLURM_NTASKS": "9"}
    sizes = [ranks.detect(environ | {"SLURM_NODEID": str(node)}) for node in range(4)]
    assert [size.local_world_size for size in sizes if size] == [2, 1, 1, 5]


def test_a_meeting_point_given_to_srun_is_used_whole_or_not_at_all() -> None:
    found = ranks.detect(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"})
    assert found and (found.master_addr, found.master_port) == ("10.0.0.1", 5000)
    assert "MASTER_PORT=(missing)" in refusal(SRUN | {"MASTER_ADDR": "10.0.0.1"})


def test_a_requeued_job_is_another_launch() -> None:
    first, second = ranks.detect(SRUN), ranks.detect(SRUN | {"SLURM_RESTART_COUNT": "1"})
    assert first and second and first.launch_id != second.launch_id


def test_rank_and_procid_that_disagree_are_refused_both_named() -> None:
    step = SRUN | {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    message = refusal(TORCHRUN | step)
    assert "RANK=1" in message and "SLURM_PROCID=0" in message


def test_world_size_and_ntasks_that_disagree_are_refused_both_named() -> None:
    message = refusal(TORCHRUN | SRUN | {"SLURM_PROCID": "1"})
    assert "WORLD_SIZE=2" in message and "SLURM_NTASKS=4" in message


def test_one_torchrun_per_node_of_a_step_is_fine() -> None:
    agents = SRUN | {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_PROCID": "1", "TORCHELASTIC_RUN_ID": "4711"}
    environ = TORCHRUN | agents | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
    found = ranks.detect(environ)
    assert found and (found.launcher, found.rank, found.world_size) == ("torchrun", 0, 4)


def test_one_torchrun_in_a_batch_script_is_fine() -> None:
    found = ranks.detect(TORCHRUN | JOB | {"SLURM_NTASKS": "2", "TORCHELASTIC_RUN_ID": "none"})
    assert found and found.rank == 1


def test_the_launcher_s_world_must_be_the_configured_one() -> None:
    environment = ranks.detect(TORCHRUN)
    assert environment is not None
    (problem,) = ranks.world_size_problems(environment, compose(["cluster.ranks=3"]))
    assert "cluster.ranks=3: the run needs 3 ranks, but torchrun started WORLD_SIZE=2" in str(problem)
    assert ranks.world_size_problems(environment, compose(["cluster.ranks=2"])) == []


def test_a_job_s_port_is_outside_of_the_ephemeral_range_and_its_own() -> None:
    ports = {ranks.port_of_job(job, ephemeral=(32768, 60999)) for job in range(100)}
    assert len(ports) == 100
    assert not ports & set(range(32768, 61000))
    assert 61000 <= ranks.port_of_job(5, ephemeral=(10000, 60999)) <= 65535


def test_an_occupied_port_is_stepped_over() -> None:
    environment = ranks.detect(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert environment is not None
    with socket.create_server(("", environment.master_port)):
        listening = ranks.listen(environment)
    assert listening.master_port > environment.master_port
    assert listening.master_listen_fd is not None
    with socket.socket(fileno=listening.master_listen_fd) as server:
        assert server.getsockname()[1] == listening.master_port


def test_our_own_launcher_s_variables_are_read_back() -> None:
    environ = rank_environ(1, 2, port=5000, launch_id="001-ab", lock_fd=7)
    found = ranks.own(environ | {ranks.STORE_FD: "9"})
    assert (found.rank, found.world_size, found.local_rank, found.launcher) == (1, 2, 1, "own")
    assert (found.master_port, found.master_listen_fd, found.launch_id) == (5000, 9, "001-ab")


def test_the_tasks_of_every_node_of_a_step_are_known_before_any_of_them_speaks() -> None:
    step = SRUN | {"SLURM_STEP_NODELIST": "n[2,5-6]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NTASKS": "5"}
    assert ranks.tasks_of_nodes(step) == {"n2": 2, "n5": 2, "n6": 1}
    assert ranks.tasks_of_nodes({}) == {}
