"""The parent of torchrun's agent on a node of a Slurm job: what it starts, and where the agents meet."""

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.conf.choices import Launcher
from shardwright.conf.problems import RefusedError
from shardwright.pretrain import node, ranks

SECOND_OF_TWO = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURMD_NODENAME": "n2",
}


def told(launcher: Launcher, **variables: str) -> list[str]:
    place = ranks.detect({**SECOND_OF_TWO, **variables})
    assert place is not None
    return list(node.agent_command(launcher, place, nodes=2, local=8, restarts=3))


def test_torchrun_numbers_the_nodes_as_slurm_does_and_meets_at_the_first() -> None:
    command = told(Launcher.torchrun)
    port = ranks.port_of_job(4242)
    assert command[3] == "torch.distributed.run"
    assert {"--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=n1", f"--master-port={port}"} <= set(
        command
    )


def test_ft_launcher_lets_nodes_join_as_they_come_at_the_first() -> None:
    command = told(Launcher.ft_launcher)
    endpoint = f"--rdzv-endpoint=n1:{ranks.port_of_job(4242)}"
    assert {"--rdzv-backend=c10d", endpoint, "--rdzv-conf=is_host=0", "--local-addr=n2", "--max-restarts=3"} <= set(
        command
    )
    assert not [word for word in command if word.startswith("--node-rank")]


def test_a_job_that_is_queued_again_has_another_port_outside_of_what_connections_take() -> None:
    ports = {ranks.port_of_job(4242, restart=restart) for restart in range(5)}
    low, high = ranks.ephemeral_ports()
    assert len(ports) == 5 and not any(low <= port <= high for port in ports)


def test_a_port_that_is_taken_is_named_before_any_rank_starts(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        variables = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "MASTER_ADDR": "n1"}
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "shardwright.pretrain.node", "--launcher=torchrun", "--nodes=2", "--ranks=1"],
            env={**os.environ, **SECOND_OF_TWO, **variables, "MASTER_PORT": port},
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    assert ended.returncode == 2
    assert f"MASTER_PORT={port}: is taken by another process on n2" in ended.stderr


def test_ranks_of_several_agents_agree_on_one_launch_though_agents_count_restarts_each_on_its_own() -> None:
    place = ranks.detect(SECOND_OF_TWO)
    assert place is not None
    started = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "50123",
        "TORCHELASTIC_RUN_ID": place.launch_id,
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    found = [ranks.detect({**started, "TORCHELASTIC_RESTART_COUNT": count}) for count in ("0", "1")]
    assert len({each.launch_id for each in found if each is not None}) == 1
    alone = {**started, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    apart = [ranks.detect({**alone, "TORCHELASTIC_RESTART_COUNT": count}) for count in ("0", "1")]
    assert len({each.launch_id for each in apart if each is not None}) == 2, "one agent counts for all its ranks"


def test_several_agents_that_start_ranks_again_over_one_store_are_refused() -> None:
    started = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
    elastic = {"MASTER_PORT": "29400", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(RefusedError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        ranks.detect({**started, **elastic})
    assert ranks.detect({**started, **elastic, "TORCHELASTIC_MAX_RESTARTS": "0"}) is not None


def test_spare_nodes_are_more_tasks_than_the_ranks_need() -> None:
    started = {
        **{name: SECOND_OF_TWO[name] for name in SECOND_OF_TWO if name != "SLURM_NTASKS"},
        "SLURM_NTASKS": "3",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "50123",
        "TORCHELASTIC_RUN_ID": "one",
    }
    found = ranks.detect(started)
    assert found is not None and dataclasses.astuple(found)[:2] == (1, 2)
