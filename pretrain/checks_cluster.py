"""Rules of the section `cluster`: what Slurm would refuse hours later, or read as something else, is refused here."""

import re
from collections.abc import Iterator

from shardwright.conf.choices import Container, Launcher
from shardwright.conf.compose import shown
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.pretrain.ranges import value_of

_TEXT_NAMES = (
    "partition account qos reservation constraint exclude switches image mounts python modules export mail comment"
)
TEXTS = ("run.name", "run.dir", *(f"cluster.{name}" for name in _TEXT_NAMES.split()))
"""Keys whose texts become part of the job script, each one quoted."""
TIME_SLACK_SECONDS = 60
"""Slurm looks at time limits once a minute. Source: man sbatch, --signal."""

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?")
_FORMS = {
    "cluster.memory": (r"\d+[KMGT]?", "must be a size as Slurm writes it", "cluster.memory=900G; 0 for all of a node"),
    "cluster.switches": (r"\d+(@[\d:-]+)?", "must be COUNT or COUNT@TIME", "cluster.switches=1@12:00:00"),
    "cluster.mounts": (r"/[^:,]*(:/[^:,]*){0,2}", "must be OUTSIDE:INSIDE, absolute paths", "[/data:/data]"),
    "cluster.export": (
        r"(?!(ALL|NONE|NIL)$)[A-Za-z_]\w*",
        "must be names of variables, without values",
        "[WANDB_API_KEY]",
    ),
    "cluster.modules": (r"[^\s-]\S*", "must be names of modules", "[cuda/13.0]"),
}
"""What some texts must look like: pattern, rule, remedy."""


def seconds_of(time: str) -> int | None:
    """A time as Slurm writes it, in seconds; None where it is none.

    `30` and `30:00` are minutes and minutes:seconds, but after `DAYS-` hours come first. Source: man sbatch, --time.
    """
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    days, *parts = (int(part) if part else None for part in match.groups())
    first, second, third = parts
    assert first is not None
    if days is not None or third is not None:
        return (days or 0) * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)
    return first * 60 + (second or 0)


def time_leaves_room_to_save(config: Config) -> Iterator[Problem]:
    time, lead = config.cluster.time, config.cluster.signal_seconds
    if time is None:
        return
    seconds = seconds_of(time)
    if not seconds:
        rule = "must be a time as Slurm writes it"
        yield Problem(key="cluster.time", value=time, rule=rule, remedy="cluster.time=4:00:00 or 2-00:00:00 works")
    elif seconds < lead + 2 * TIME_SLACK_SECONDS:
        rule = f"leaves the run no time: it is told to stop cluster.signal_seconds={lead} s before, by Slurm's clock"
        remedy = f"at least {-(-lead // 60) + 2} minutes, or a smaller cluster.signal_seconds"
        yield Problem(key="cluster.time", value=time, rule=rule, remedy=remedy)


def texts_are_one_line(config: Config) -> Iterator[Problem]:
    for key in TEXTS:
        value = value_of(config, key)
        for text in value if isinstance(value, list) else [value]:
            if text is not None and not str(text).isprintable():
                rule = "holds a control character, and one line of the job script is written with it"
                yield Problem(key=key, value=repr(text), rule=rule)
            elif text == "" and key != "run.name" and key != "run.dir":
                yield Problem(key=key, value="", rule="must not be empty", remedy=f"{key}=null leaves it out")


def texts_have_their_form(config: Config) -> Iterator[Problem]:
    for key, (pattern, rule, remedy) in _FORMS.items():
        value = value_of(config, key)
        for text in value if isinstance(value, list) else [value]:
            if text and not re.fullmatch(pattern, text):
                yield Problem(key=key, value=text, rule=rule, remedy=remedy)


def containers_have_an_image(config: Config) -> Iterator[Problem]:
    container, image = config.cluster.container, config.cluster.image
    if (container is Container.none) != (image is None):
        rule = f"cluster.container={container.name} {'needs none' if image else 'needs one'}"
        remedy = "cluster.container=pyxis or apptainer, each with cluster.image=..."
        yield Problem(key="cluster.image", value=shown(image), rule=rule, remedy=remedy)


def restarts_inside_a_job_have_their_launcher(config: Config) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.launcher is Launcher.ft_launcher:
        return
    for key, value in (("in_job_restarts", cluster.in_job_restarts), ("spare_nodes", cluster.spare_nodes)):
        if value > 0:
            rule = f"cluster.launcher={cluster.launcher.name} starts no rank a second time inside of a job"
            remedy = f"cluster.launcher=ft_launcher, or cluster.{key}=0: Slurm queues the job again"
            yield Problem(key=f"cluster.{key}", value=value, rule=rule, remedy=remedy)


def a_chain_is_instead_of_requeues(config: Config) -> Iterator[Problem]:
    if config.cluster.chain > 1 and config.cluster.requeue:
        rule = "a job that is queued again needs no successor"
        remedy = "cluster.requeue=false where the site forbids requeues, or cluster.chain=1"
        yield Problem(key="cluster.chain", value=config.cluster.chain, rule=rule, remedy=remedy)


RULES = (
    time_leaves_room_to_save,
    texts_are_one_line,
    texts_have_their_form,
    containers_have_an_image,
    restarts_inside_a_job_have_their_launcher,
    a_chain_is_instead_of_requeues,
)
