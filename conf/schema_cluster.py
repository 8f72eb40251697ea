"""The section `cluster`: the machines of a run, and what Slurm is asked for by `shardwright submit`.

A key that is null is left out of the job script, so that the site's own default counts.
"""

from dataclasses import dataclass

from shardwright.conf.choices import Container, GpuKind, Launcher
from shardwright.conf.keys import items, key


@dataclass(kw_only=True, slots=True)
class Cluster:
    """The machines; from `partition` on for `submit` alone."""

    nodes: int = key(resume="free")
    """Machines of the run; `train` starts ranks itself on one only."""
    gpus_per_node: int = key(resume="free")
    """Ranks per machine, one per GPU; on the CPU simply ranks."""
    ranks: int | None = key(resume="free")
    """World size; null for nodes * gpus_per_node."""
    gpu: GpuKind = key(resume="free")
    """Which GPU the machines have; FP8 recipes and MFU are judged against it."""
    mfu: float = key(resume="free")
    """Share of the GPU's peak in BF16 that training is expected to reach; for the times of `plan` alone."""
    failures_per_gpu_day: float = key(resume="free")
    """How often a GPU, or what belongs to it, ends a run; for `plan` alone. 466 in 54 days of 16,384 GPUs: 0.00053."""
    restart_seconds: float = key(resume="free")
    """Expected from a failure to the next step: noticing, queueing, starting, loading; for `plan` alone."""
    save_stall_seconds: float = key(resume="free")
    """Expected time that training waits for one save, above 0; for `plan` alone. `explain` shows what it was."""
    partition: str | None = key(resume="free")
    """Slurm's partition; several, separated by commas, take the first that is free."""
    account: str | None = key(resume="free")
    """Who is charged."""
    qos: str | None = key(resume="free")
    """Quality of service."""
    reservation: str | None = key(resume="free")
    """A reservation to run in."""
    constraint: str | None = key(resume="free")
    """Features that every node must have, in Slurm's grammar: `h100&nvme`."""
    exclude: str | None = key(resume="free")
    """Nodes not to be used, in Slurm's short form: `node[03,07-09]`."""
    switches: str | None = key(resume="free")
    """Most leaf switches that the nodes may hang on, and how long to wait for that: `1@12:00:00`."""
    time: str | None = key(resume="free")
    """Limit of one job, as Slurm writes it: `30` (minutes), `4:00:00`, `2-00:00:00`; longer runs are queued again."""
    cpus: int | None = key(resume="free")
    """CPU cores of one rank."""
    memory: str | None = key(resume="free")
    """Memory of one node: `900G`; 0 for all that it has."""
    exclusive: bool = key(resume="free")
    """Share the nodes with no other job."""
    launcher: Launcher = key(resume="free")
    """What starts the ranks of a job."""
    in_job_restarts: int = key(resume="free")
    """How often failed ranks start again inside of one job, without Slurm; `launcher=ft_launcher` can."""
    spare_nodes: int = key(resume="free")
    """Nodes beside `nodes` that wait in the job to take the place of one that is lost; `launcher=ft_launcher` can."""
    requeue: bool = key(resume="free")
    """Queue the job again after a preemption, the time limit, or a fault that may pass."""
    chain: int = key(resume="free")
    """Jobs that are submitted at once, each to begin when the one before has ended, where a site forbids requeues."""
    preflight: bool = key(resume="free")
    """Let every job first examine its nodes, for about a minute; one that is not fit is handled as a failure."""
    exclude_failed: bool = key(resume="free")
    """Leave a node whose hardware failed, or on which a rank hung, out of the tries that follow."""
    signal_seconds: int = key(resume="free")
    """This long before the time limit, or before Slurm preempts, the run is told to save and stop. Slurm counts in
    minutes and may be up to 60 s early. More than the longest step, evaluation and save together."""
    array_limit: int | None = key(resume="free")
    """Points of a sweep that run at the same time; null for all."""
    container: Container = key(resume="free")
    """What the ranks run in."""
    image: str | None = key(resume="free")
    """The container's image: `nvcr.io#nvidia/pytorch:TAG` or a `.sqsh` for pyxis, a `.sif` for apptainer."""
    mounts: list[str] = items(resume="free")
    """Folders that the container sees, `OUTSIDE:INSIDE`; the run's folder and the present one are there always."""
    python: str | None = key(resume="free")
    """The interpreter of the ranks, with this package; null for the one that submits, in a container for `python3`."""
    modules: list[str] = items(resume="free")
    """Environment modules that the job loads."""
    setup: list[str] = items(resume="free")
    """Lines of bash that the job runs before the ranks, as they stand: `export NCCL_SOCKET_IFNAME=ib0`."""
    export: list[str] = items(resume="free")
    """Names of environment variables that go along, beside PATH, HOME and the like; nothing else does. Values are
    taken when submitting and stand in no file of the run."""
    mail: str | None = key(resume="free")
    """Address that Slurm writes to when the job ends, fails or is queued again."""
    comment: str | None = key(resume="free")
    """A comment in Slurm's books."""
