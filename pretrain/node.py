"""The task of one node in a Slurm job whose ranks torchrun starts (`cluster.launcher`): the parent of its agent.

`python -m shardwright.pretrain.node --launcher torchrun --nodes 2 --ranks 8 OVERRIDES` is what srun starts once per
node. Where the agents meet follows from Slurm's variables (`ranks.detect`), without scontrol.

Of SIGUSR1 an agent dies and leaves its ranks behind, and after SIGTERM torchrun kills them within 30 seconds
(pytorch#154849, #119856), while a save may take longer. So agents begin with SIGUSR1 ignored, torchrun with the other
stop signals blocked too (ft_launcher waits for half an hour, and ends its rank monitors by SIGTERM), and whatever
srun sends to this process goes to the ranks as SIGUSR1, which they take as soon as they can answer by saving.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardwright.conf.choices import Launcher
from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.pretrain import guard, ranks, requirements
from shardwright.pretrain.faults import REFUSED
from shardwright.pretrain.launch import STOP_SIGNALS, blocked, latched_signals
from shardwright.pretrain.ranks import RankEnvironment

_MODULES = {
    Launcher.torchrun: "torch.distributed.run",
    Launcher.ft_launcher: "nvidia_resiliency_ext.fault_tolerance.launcher",
}
_POLL_SECONDS = 0.5


def main() -> int:
    """Start the agent of this node, and pass stop signals on to its ranks until it ends.

    Returns:
        The agent's exit code, 2 where it was not started. What became of the run is in its folder.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", type=Launcher, required=True)
    parser.add_argument("--nodes", type=int, required=True, help="nodes that train")
    parser.add_argument("--ranks", type=int, required=True, help="ranks of one node")
    parser.add_argument("--restarts", type=int, default=0, help="how often ranks start again inside of the job")
    options, overrides = parser.parse_known_args()
    node = ranks.detect(os.environ)
    if node is None or node.launcher != "srun":
        raise SystemExit("shardwright.pretrain.node is a task of srun, one on each node")
    try:
        refuse(list(_problems(options.launcher, node)))
    except RefusedError as error:
        print(error, file=sys.stderr)
        return REFUSED
    command = agent_command(options.launcher, node, options.nodes, options.ranks, options.restarts)
    with blocked(STOP_SIGNALS if options.launcher is Launcher.torchrun else ()):
        agent = subprocess.Popen(
            [*command, "-m", "shardwright.pretrain", "train", *overrides],
            env={**os.environ, "PYTHONSAFEPATH": "1", ranks.NODE: "1"},
            stdin=subprocess.DEVNULL,
            preexec_fn=_in_agent,
        )
    with latched_signals() as signals:
        while agent.poll() is None:
            for rank in _ranks_of(agent.pid) if signals.stops else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGUSR1)
            time.sleep(_POLL_SECONDS)
    return agent.returncode if agent.returncode >= 0 else 128 - agent.returncode


def _in_agent() -> None:
    """In the new process, before it becomes the agent."""
    guard.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _problems(launcher: Launcher, node: RankEnvironment) -> Iterator[Problem]:
    """What keeps this node's agent from starting."""
    if launcher is Launcher.ft_launcher:
        package = "nvidia_resiliency_ext"
        missing = requirements.problem(package, requirements.version(package))
        if missing is not None:
            yield missing
    if not ranks.port_is_free(node):
        rule = f"is taken by another process on {node.host}"
        remedy = "the next job has another port, or cluster.setup=['export MASTER_ADDR=NODE MASTER_PORT=PORT']"
        yield Problem(key="MASTER_PORT", value=node.master_port, rule=rule, remedy=remedy)


def agent_command(launcher: Launcher, node: RankEnvironment, nodes: int, local: int, restarts: int) -> Sequence[str]:
    """The agent's command line, up to the program that the ranks run.

    torchrun numbers the nodes as Slurm does, which knows how they are wired. ft_launcher lets them join as they come,
    the ones that are too many as spares.

    Args:
        launcher: torchrun or ft_launcher.
        node: this node's task of srun.
        nodes: nodes that train.
        local: ranks of each.
        restarts: how often ranks start again inside of the job.
    """
    meets = (
        [f"--node-rank={node.rank}", f"--master-addr={node.master_addr}", f"--master-port={node.master_port}"]
        if launcher is Launcher.torchrun
        else [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={node.master_addr}:{node.master_port}",
            f"--rdzv-conf=is_host={int(node.rank == 0)}",
            f"--local-addr={node.host}",
        ]
    )
    return [
        sys.executable,
        "-P",
        "-m",
        _MODULES[launcher],
        f"--nnodes={nodes}",
        f"--nproc-per-node={local}",
        f"--max-restarts={restarts}",
        f"--rdzv-id={node.launch_id}",
        *meets,
    ]


def _ranks_of(agent: int) -> Iterator[int]:
    """Process ids of the ranks that an agent has started."""
    for pid in guard.children(agent):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if any(variable.startswith(b"LOCAL_RANK=") for variable in variables):
            yield pid


if __name__ == "__main__":
    sys.exit(main())
