"""Which rank this process is: told by torchrun, srun or our own launcher; never guessed from half an environment.

`detect` reads environment variables alone and answers one of three: this process is a rank (torchrun or srun started
it), it is none (a shell, also one inside of a Slurm job), or the variables are incomplete or contradict each other,
which is refused: a rank that believes the wrong variables trains a world of its own and writes where others write.

A Slurm batch script has SLURM_PROCID=0 too; only a job step's tasks have SLURM_STEP_ID. `srun --pty bash` is a step of
one task that a person types in, so it is a shell.
"""

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import Config
from shardwright.pretrain import nodelist

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")
_FIRST_RESERVED_STEP = 0xFFFFFFF0
"""Steps from here on are Slurm's own (batch, extern, interactive), not an srun's. Source: slurm/slurm.h."""
_PORTS = 10000
"""First port used for a Slurm job; below are services."""

LAUNCHER_PID, STORE_FD, LOCK_FD, LAUNCH_ID = (
    f"SHARDWRIGHT_{name}" for name in ("LAUNCHER_PID", "STORE_FD", "LOCK_FD", "LAUNCH_ID")
)
"""Variables between our own launcher and its ranks."""
NODE = "SHARDWRIGHT_NODE"
"""Set for ranks whose agent `node` started: what they end with is for the agent alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """One rank's place among the processes of a run, and where the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    """own, torchrun or srun."""
    launch_id: str
    """The same for all ranks of one launch, different for the next one and after a restart."""
    host: str
    master_addr: str
    master_port: int
    agent_store: bool = False
    """Whether torchrun's agent already serves the store at master_addr:master_port."""
    master_listen_fd: int | None = None
    """Rank 0 of our own launcher: the bound, listening socket to serve the store on."""

    @property
    def serves_store(self) -> bool:
        """Whether this rank has to serve the store that the ranks meet at."""
        return self.rank == 0 and not self.agent_store


def detect(environ: Mapping[str, str]) -> RankEnvironment | None:
    """The rank that torchrun or srun made of this process, or None where neither did.

    Raises:
        RefusedError: variables that are missing, malformed or contradict each other, each named.
    """
    return _torchrun(environ) if _started_by_torchrun(environ) else _srun(environ)


def tasks_of_nodes(environ: Mapping[str, str]) -> dict[str, int]:
    """Nodes of this job step and how many tasks srun starts on each; empty where srun is not the launcher."""
    if _started_by_torchrun(environ) or not _is_srun_task(environ):
        return {}
    hosts = nodelist.expand(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    tasks = _numbers(environ, ("SLURM_NTASKS",))[0]
    return {host: _tasks_of_node(environ, tasks, len(hosts), node) for node, host in enumerate(hosts)}


def world_size_problems(environment: RankEnvironment, config: Config) -> list[Problem]:
    """What stands against the number of ranks that torchrun or srun started."""
    if environment.world_size == config.world_size:
        return []
    launcher, started = environment.launcher, environment.world_size
    variable = "WORLD_SIZE" if launcher == "torchrun" else "SLURM_NTASKS"
    rule = f"the run needs {config.world_size} ranks, but {launcher} started {variable}={started}"
    remedy = f"start {config.world_size} ranks, or cluster.ranks={started}"
    return [Problem(key="cluster.ranks", value=config.world_size, rule=rule, remedy=remedy)]


def own(environ: Mapping[str, str]) -> RankEnvironment:
    """The rank that our own launcher (`launch.rank_environ`) made of this process."""
    fd = environ.get(STORE_FD)
    return RankEnvironment(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
        launcher="own",
        launch_id=environ[LAUNCH_ID],
        host=host_name(environ),
        master_addr=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        master_listen_fd=int(fd) if fd else None,
    )


def host_name(environ: Mapping[str, str]) -> str:
    """This machine's name; Slurm's where it has one, since several of its nodes may share a machine."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _started_by_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether any variable is there that only torchrun (or somebody in its place) sets.

    MASTER_ADDR and MASTER_PORT alone belong to an srun that is told where to meet.
    """
    named = [name for name in _TORCHRUN if name in environ]
    return bool(named) and not (_is_srun_task(environ) and set(named) == {"MASTER_ADDR", "MASTER_PORT"})


def _torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    _need_all(environ, _TORCHRUN, "torchrun sets all of them; unset the others, or start through torchrun")
    numbers = _numbers(environ, (*_TORCHRUN[:4], "MASTER_PORT"))
    rank, world_size, local_rank, local_world_size, port = numbers
    _need_inside(environ, "RANK", rank, "WORLD_SIZE", world_size)
    _need_inside(environ, "LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    _need_agreement_with_slurm(environ, rank, world_size, local_world_size)
    run, shared = environ.get("TORCHELASTIC_RUN_ID", "none"), environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restart = f", restart {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if local_world_size < world_size:  # several agents: each counts its own restarts
        restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if shared and restarts != "0":
            rule = "several agents that start ranks again over one store leave no sign of which ranks belong together"
            remedy = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives every round its own port; or --max-restarts=0"
            raise RefusedError([Problem(key="TORCHELASTIC_MAX_RESTARTS", value=restarts, rule=rule, remedy=remedy)])
        restart = restart if shared else ""
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        launcher="torchrun",
        launch_id=f"torchrun {run} at {environ['MASTER_ADDR']}:{port}{restart}",
        host=host_name(environ),
        master_addr=environ["MASTER_ADDR"],
        master_port=port,
        agent_store=shared,
    )


def _need_agreement_with_slurm(environ: Mapping[str, str], rank: int, world_size: int, local_size: int) -> None:
    """Refuse torchrun's variables where Slurm's say something else.

    One torchrun per node inside of a job is fine, whatever order its rendezvous gave the nodes; so is one torchrun in a
    batch script. As many tasks as ranks means that Slurm started the ranks: then both must number them alike.
    """
    if "SLURM_NTASKS" not in environ or "SLURM_PROCID" not in environ:
        return
    tasks, task = _numbers(environ, ("SLURM_NTASKS", "SLURM_PROCID"))
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or ("1" if tasks == 1 else "0")
    has_agent = "TORCHELASTIC_RUN_ID" in environ
    one_per_node = int(nodes) == tasks
    trains = world_size == tasks * local_size or (has_agent and world_size < tasks * local_size)  # else spare nodes
    remedy = "start either torchrun once per node (srun --ntasks-per-node=1 torchrun ...), or srun alone"
    if world_size != tasks and not (one_per_node and trains):
        rule = f"contradicts Slurm's SLURM_NTASKS={tasks}"
        raise RefusedError([Problem(key="WORLD_SIZE", value=world_size, rule=rule, remedy=remedy)])
    numbered_by_agent = has_agent and (one_per_node or not _is_srun_task(environ))
    if world_size == tasks and rank != task and not numbered_by_agent:
        rule = f"contradicts Slurm's SLURM_PROCID={task}"
        raise RefusedError([Problem(key="RANK", value=rank, rule=rule, remedy=remedy)])


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID")
    if step is None:  # a batch script is always process 0
        return environ.get("SLURM_PROCID", "0") != "0"
    if step.isdigit() and int(step) >= _FIRST_RESERVED_STEP:
        return False
    return not ("SLURM_PTY_PORT" in environ and environ.get("SLURM_NTASKS", "1") == "1")


def _srun(environ: Mapping[str, str]) -> RankEnvironment | None:
    if not _is_srun_task(environ):
        return None
    _need_all(environ, (*_SRUN, "SLURM_STEP_ID"), "srun sets all of them; pass the environment on whole")
    rank, tasks, local_rank, node = _numbers(environ, _SRUN[:4])
    _need_inside(environ, "SLURM_PROCID", rank, "SLURM_NTASKS", tasks)
    variable = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    hosts = nodelist.expand(environ[variable], variable=variable)
    _need_inside(environ, "SLURM_NODEID", node, variable, len(hosts))
    local_world_size = _tasks_of_node(environ, tasks, len(hosts), node)
    (job,) = _numbers(environ, ("SLURM_JOB_ID",))
    (step,) = _numbers(environ, ("SLURM_STEP_ID",))
    (restart,) = _numbers({"SLURM_RESTART_COUNT": "0", **environ}, ("SLURM_RESTART_COUNT",))
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if (address is None) != (port is None):
        _need_all(environ, ("MASTER_ADDR", "MASTER_PORT"), "set both, or none: then Slurm's own variables are used")
    return RankEnvironment(
        rank=rank,
        world_size=tasks,
        local_rank=local_rank,
        local_world_size=local_world_size,
        launcher="srun",
        launch_id=f"slurm {job}.{step}, restart {restart}",
        host=host_name(environ),
        master_addr=address or hosts[0],
        master_port=_numbers(environ, ("MASTER_PORT",))[0] if port else port_of_job(job, step, restart),
    )


def port_of_job(job: int, step: int = 0, restart: int = 0, ephemeral: tuple[int, int] | None = None) -> int:
    """A port that all ranks of a job step compute alike, other jobs differently, and no outgoing connection takes.

    Args:
        job, step, restart: Slurm's numbers.
        ephemeral: first and last port of outgoing connections; read from this machine if None.
    """
    low, high = ephemeral or ephemeral_ports()
    below, above = range(_PORTS, low), range(high + 1, 65536)
    ports = below if len(below) >= len(above) else above
    if not ports:  # a site that gave every port away: collisions are then possible, and seen when the port is bound
        ports = range(_PORTS, 65536)
    return ports[(job + 1009 * step + 10007 * restart) % len(ports)]


def listen(environment: RankEnvironment) -> RankEnvironment:
    """Bind the port of the store that this rank serves; the next free one if it is taken.

    Returns:
        The environment with the port that was bound and its descriptor; unchanged where torchrun's agent serves.
    """
    if not environment.serves_store:
        return environment
    for port in range(environment.master_port, 65536):
        if (server := _serve(port)) is not None:
            return replace(environment, master_port=port, master_listen_fd=server.detach())
    rule = "no port from here on is free"
    raise RefusedError([Problem(key="MASTER_PORT", value=environment.master_port, rule=rule)])


def port_is_free(environment: RankEnvironment) -> bool:
    """Whether the port where ranks are to meet can be bound by the one that serves it; True for all others."""
    if environment.rank != 0:
        return True
    server = _serve(environment.master_port)
    if server is not None:
        server.close()
    return server is not None


def _serve(port: int) -> socket.socket | None:
    """A socket that listens on a port of all addresses; None where another process has it."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def ephemeral_ports() -> tuple[int, int]:
    """First and last port that the kernel gives to outgoing connections."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(low), int(high)


def _tasks_of_node(environ: Mapping[str, str], tasks: int, nodes: int, node: int) -> int:
    """Tasks of this step on its node number `node`, from a list such as `2(x3),1`; spread evenly if there is none."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None:
        return -(-tasks // nodes)
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts.extend([int(count)] * int(times or 1))
    return counts[node]


def _need_all(environ: Mapping[str, str], names: tuple[str, ...], remedy: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        there = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        rule = f"{there} is set, and half an environment is not trusted"
        refuse([Problem(key=", ".join(missing), value="(missing)", rule=rule, remedy=remedy)])


def _numbers(environ: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    refuse(
        [
            Problem(key=name, value=environ[name], rule="must be a whole number of at least 0")
            for name in names
            if not (environ[name].isascii() and environ[name].isdigit())
        ]
    )
    return [int(environ[name]) for name in names]


def _need_inside(environ: Mapping[str, str], name: str, value: int, bound_name: str, bound: int) -> None:
    if value >= bound:
        rule = f"must be smaller than {bound_name}={environ[bound_name]}"
        raise RefusedError([Problem(key=name, value=value, rule=rule)])
