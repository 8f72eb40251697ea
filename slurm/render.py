"""The job script of a run or of a sweep, from the template `job.sbatch.j2`.

Whatever comes from a configuration stands in it quoted as one word of the shell (`shlex.quote`), in `#SBATCH` lines
too, whose quotes Slurm reads alike; a name such as `x$(touch c)` stays a name. The lines of `cluster.setup` alone are
code: they are the user's own. No variable of the environment is written: `--export` names those that go along.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from shardwright.conf.choices import Container, GpuKind, Launcher
from shardwright.conf.problems import Problem, RefusedError
from shardwright.conf.schema import Config
from shardwright.conf.schema_cluster import Cluster
from shardwright.conf.spans import spans
from shardwright.pretrain.folder import RunFolder

ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "MODULEPATH")
"""Variables that go along with every job."""
_OPTIONS = ("partition", "account", "qos", "reservation", "constraint", "exclude", "switches", "time", "comment")
"""Keys of `cluster` that are options of sbatch by the same name."""
_PREFLIGHT_WAIT_SECONDS = 180
"""The same of a preflight, whose tests have timeouts of their own."""
_WAIT_SECONDS = 60
"""After the first task has left, the others have this long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a job script."""

    index: int
    folder: Path
    """Absolute."""
    overrides: Sequence[str]
    """What `train` is told."""


def script(config: Config, points: Sequence[Point], *, name: str, log_folder: Path, array: bool = False) -> str:
    """The whole script.

    Args:
        config: what is asked of Slurm; all points of a sweep ask for the same.
        points: the run, or the points of a sweep that are to be run.
        name: the job's.
        log_folder: where the job writes before it knows its run.
        array: whether it is a sweep.
    """
    cluster, local = config.cluster, config.world_size // config.cluster.nodes
    nodes, tasks, cpus = _shape(cluster, local)
    log = "slurm-%A_%a.log" if array else "slurm-%j.log"
    options: dict[str, object] = {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": cpus,
        "gres": None if cluster.gpu is GpuKind.none else f"gpu:{local}",
        "mem": cluster.memory,
        **{option: getattr(cluster, option) for option in _OPTIONS},
        "exclude": cluster.exclude if array else RunFolder(points[0].folder).excluded(cluster.exclude),
        "mail-user": cluster.mail,
        "mail-type": "END,FAIL,REQUEUE" if cluster.mail else None,
        "signal": f"B:USR1@{cluster.signal_seconds}" if cluster.signal_seconds else None,
        "array": _array(points, cluster.array_limit) if array else None,
        "chdir": str(Path.cwd()),
        "output": f"{str(log_folder).replace('%', '%%')}/{log}",
        "open-mode": "append",
        "export": exported(cluster),
    }
    flags = ["requeue" if cluster.requeue else "no-requeue"]
    flags += ["exclusive"] if cluster.exclusive else []
    flags += ["no-kill"] if cluster.spare_nodes else []
    container = _srun_container(cluster, points)
    return _template().render(
        options=[_option(name, str(value)) for name, value in options.items() if value is not None] + flags,
        points=points,
        array=array,
        modules=cluster.modules,
        setup=cluster.setup,
        requeue=cluster.requeue,
        chain=cluster.chain > 1,
        exclude=(f"{cluster.exclude}," if cluster.exclude else "") if cluster.exclude_failed else None,
        preflight=cluster.preflight
        and [
            *_srun(cluster, nodes, tasks, cpus, alone=True),
            *container,
            *_inside(cluster, points),
            *("-P", "-m", "shardwright.pretrain", "preflight"),
        ],
        srun=_srun(cluster, nodes, tasks, cpus) + container,
        train=[*_inside(cluster, points), "-P", "-m", *_program(cluster, local)],
        alone=(["srun", "--nodes=1", "--ntasks=1", "--overlap", "--export=ALL", *container] if container else [])
        + _inside(cluster, points),
    )


def _option(name: str, value: str) -> str:
    """One `#SBATCH` option; a line break would end its comment, and what follows would be code."""
    if not value.isprintable():
        rule = "holds a control character, and one line of the job script is written with it"
        raise RefusedError([Problem(key=f"--{name}", value=repr(value), rule=rule)])
    return f"{name}={shlex.quote(value)}"


def exported(cluster: Cluster) -> str:
    """Value of sbatch's `--export`: names alone."""
    return ",".join(dict.fromkeys((*ENVIRONMENT, *cluster.export)))


def _array(points: Sequence[Point], limit: int | None) -> str:
    """`0-3,5%2`: these points, two of them at a time."""
    text = spans(point.index for point in points)
    return text if limit is None else f"{text}%{limit}"


def _shape(cluster: Cluster, local: int) -> tuple[int, int, int | None]:
    """Nodes, tasks of each and cores of a task: a task per rank, or one per node for an agent that starts ranks."""
    nodes = cluster.nodes + cluster.spare_nodes
    if cluster.launcher is Launcher.srun:
        return nodes, local, cluster.cpus
    return nodes, 1, cluster.cpus and cluster.cpus * local


def _program(cluster: Cluster, local: int) -> list[str]:
    """The module that a task runs, and its options before the overrides."""
    if cluster.launcher is Launcher.srun:
        return ["shardwright.pretrain", "train"]
    options = [f"--launcher={cluster.launcher.name}", f"--nodes={cluster.nodes}", f"--ranks={local}"]
    restarts = [f"--restarts={cluster.in_job_restarts}"] if cluster.in_job_restarts else []
    return ["shardwright.pretrain.node", *options, *restarts]


def _srun(cluster: Cluster, nodes: int, tasks: int, cpus: int | None, *, alone: bool = False) -> list[str]:
    """Options of srun: the end of one task is the end of all, but where ranks start again.

    srun knows neither sbatch's `--cpus-per-task` (since Slurm 22.05) nor, after an `--export` of names, the script's
    environment; both are said again.

    Args:
        cluster: the machines.
        nodes, tasks, cpus: see `_shape`.
        alone: tasks go on without those that die.
    """
    replaced = cluster.launcher is Launcher.ft_launcher
    options = [
        f"--nodes={nodes}",
        f"--ntasks={nodes * tasks}",
        f"--ntasks-per-node={tasks}",
        "--export=ALL",
        f"--kill-on-bad-exit={int(not (replaced or alone))}",
        f"--wait={_PREFLIGHT_WAIT_SECONDS if alone else 0 if replaced else _WAIT_SECONDS}",
        "--input=none",
        *(["--no-kill"] if cluster.spare_nodes or alone else []),
    ]
    return options + ([f"--cpus-per-task={cpus}"] if cpus else [])


def _srun_container(cluster: Cluster, points: Sequence[Point]) -> list[str]:
    """Options of Pyxis for srun; none without it."""
    if cluster.container is not Container.pyxis:
        return []
    return [
        f"--container-image={cluster.image}",
        f"--container-mounts={','.join(_mounts(cluster, points))}",
        f"--container-workdir={Path.cwd()}",
        "--no-container-mount-home",
    ]


def _inside(cluster: Cluster, points: Sequence[Point]) -> list[str]:
    """The interpreter, inside of its container."""
    if cluster.container is Container.none:
        return [cluster.python or sys.executable]
    python = cluster.python or "python3"
    if cluster.container is Container.pyxis:
        return [python]
    gpus = [] if cluster.gpu is GpuKind.none else ["--nv"]
    binds = [word for mount in _mounts(cluster, points) for word in ("--bind", mount)]
    return ["apptainer", "exec", *gpus, *binds, "--pwd", str(Path.cwd()), str(cluster.image), python]


def _mounts(cluster: Cluster, points: Sequence[Point]) -> list[str]:
    folders = dict.fromkeys([str(Path.cwd()), *(str(point.folder) for point in points)])
    return [*(f"{folder}:{folder}" for folder in folders), *cluster.mounts]


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["words"] = lambda words: " ".join(shlex.quote(str(word)) for word in words)
    environment.filters["word"] = lambda word: shlex.quote(str(word))
    return environment.get_template("job.sbatch.j2")
