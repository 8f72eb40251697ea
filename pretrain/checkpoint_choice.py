"""Which checkpoint a run continues from, judged by names, markers, manifests and sizes before any rank exists.

What is not whole is told and passed over (`checkpoint.fallback=previous`) or ends the start (`stop`), and so is what
killed those who loaded it (`checkpoint_trouble`). Contents are not read here: the ranks compare the digests of what was
chosen (`checkpoint_integrity`), and take the next of `fallbacks` where they differ. No torch here.
"""

from dataclasses import dataclass
from pathlib import Path

from shardwright.conf.choices import Fallback, OptimizerFormat, ResumeMode
from shardwright.conf.compose import differences, shown
from shardwright.conf.problems import Problem, RefusedError
from shardwright.conf.schema import Checkpoint, Config
from shardwright.pretrain import checkpoint_trouble, trust
from shardwright.pretrain.checkpoint_store import Committed, Damaged, damage, step_of, survey


@dataclass(frozen=True, slots=True)
class Choice:
    """What a start loads."""

    load: Committed | None = None
    """None starts at step 0."""
    fallbacks: tuple[Committed, ...] = ()
    """What to take instead if the content of `load` is damaged, newest first."""
    damaged: tuple[Damaged, ...] = ()
    """Newer ones that are not whole and were passed over."""


def find(config: Checkpoint, root: Path) -> Choice:
    """What a run with folder `root` for its checkpoints starts from.

    Raises:
        RefusedError: what was asked for does not exist (the message lists what does), or exists against `resume=never`,
            or nothing is whole of what there is, or the newest is not under `fallback=stop`.
    """
    own, damaged = survey(root)
    if config.load_step is None:  # what is asked for by its step is tried again
        own, damaged = _without_unloadable(own, damaged, root)
    if (own or damaged) and config.resume is ResumeMode.never:
        problem = Problem(
            key="checkpoint.resume",
            value="never",
            rule=f"the run's folder already holds {_steps(own)}{_named(damaged)}",
            remedy="give the new run another run.dir, or continue this one with checkpoint.resume=auto",
        )
        raise RefusedError([problem])
    if own:
        return _choose(config, own, damaged, root)
    if damaged:
        problem = Problem(
            key="checkpoint.resume",
            value=config.resume.name,
            rule=f"there is no whole checkpoint in {root}{_named(damaged)}",
            remedy="move them out of that folder to start without them, or name one by checkpoint.load_step",
        )
        raise RefusedError([problem])
    if config.load is not None:
        choice = _choose(config, *_elsewhere(Path(config.load)), Path(config.load))
        if not config.trusted:
            _refuse_foreign(choice, config.load)
        return choice
    if config.resume is ResumeMode.must:
        problem = Problem(
            key="checkpoint.resume",
            value="must",
            rule=f"there is no whole checkpoint in {root}",
            remedy="checkpoint.resume=auto starts at step 0",
        )
        raise RefusedError([problem])
    return _choose(config, [], [], root) if config.load_step is not None else Choice()


def moved_buckets(checkpoint: Path, saved: Config, present: Config) -> list[Problem]:
    """What stands against loading the optimizer's buckets, which fit the layout alone that wrote them."""
    if saved.checkpoint.optimizer_format is not OptimizerFormat.dp_reshardable:
        return []
    moved = {each.key: shown(each.present) for each in differences(saved, present) if each.key.startswith("parallel.")}
    if saved.world_size != present.world_size:
        moved["cluster.ranks"] = str(present.world_size)
    rule = f"the checkpoint {checkpoint} loads in the layout that wrote it alone (dp_reshardable)"
    remedy = "first go on in it and save with checkpoint.optimizer_format=fully_reshardable"
    return [Problem(key=key, value=value, rule=rule, remedy=remedy) for key, value in moved.items()]


def _without_unloadable(
    whole: list[Committed], damaged: list[Damaged], root: Path
) -> tuple[list[Committed], list[Damaged]]:
    """What kills those who load it counts as damaged; each oldest first."""
    reasons = checkpoint_trouble.unloadable(root)
    bad = [Damaged(one.step, one.path, reason) for one in whole if (reason := reasons.get(one.path))]
    rest = [one for one in whole if one.path not in reasons]
    return rest, sorted([*damaged, *bad], key=lambda found: found.step)


def _refuse_foreign(choice: Choice, named: str) -> None:
    for checkpoint in (choice.load, *choice.fallbacks):
        reason = trust.foreign(checkpoint.path) if checkpoint else None
        if checkpoint and reason:
            problem = Problem(
                key="checkpoint.load",
                value=named,
                rule=f"{checkpoint.path.name} there is foreign: {reason}, who chooses the weights that you go on with",
                remedy="checkpoint.trusted=true takes it; nothing in it is run in either case",
            )
            raise RefusedError([problem])


def _elsewhere(path: Path) -> tuple[list[Committed], list[Damaged]]:
    """Checkpoints that `checkpoint.load` names: one checkpoint, a checkpoints folder, or a run's folder."""
    step = step_of(path)
    if step is not None and path.is_dir():
        reason = damage(path)
        if reason is None:
            return [Committed(step, path)], []
        raise RefusedError([Problem(key="checkpoint.load", value=path, rule=f"this checkpoint is not whole: {reason}")])
    for folder in (path, path / "checkpoints"):
        whole, damaged = survey(folder)
        if whole:
            return whole, damaged
        if damaged:
            rule = f"there is no whole checkpoint{_named(damaged)}"
            raise RefusedError([Problem(key="checkpoint.load", value=path, rule=rule)])
    nearest = next(parent for parent in [path, *path.parents] if parent.exists())
    there = ", ".join(sorted(entry.name for entry in nearest.iterdir())[:10]) if nearest.is_dir() else "a file"
    problem = Problem(
        key="checkpoint.load",
        value=path,
        rule="there is no whole checkpoint",
        remedy=f"{nearest} holds: {there or 'nothing'}",
    )
    raise RefusedError([problem])


def _choose(config: Checkpoint, available: list[Committed], damaged: list[Damaged], root: Path) -> Choice:
    if config.load_step is not None:
        for checkpoint in available:
            if checkpoint.step == config.load_step:
                return Choice(checkpoint)  # exactly this one was asked for: no other will do
        problem = Problem(
            key="checkpoint.load_step",
            value=config.load_step,
            rule=f"{root} holds {_steps(available)}{_named(damaged)}",
            remedy="name one of these, or leave checkpoint.load_step out for the newest",
        )
        raise RefusedError([problem])
    newest = available[-1]
    newer = [other for other in damaged if other.step > newest.step]
    if config.fallback is Fallback.stop:
        if newer:
            problem = Problem(
                key="checkpoint.fallback",
                value="stop",
                rule=f"the newest checkpoint in {root} is not whole: {newer[-1]}",
                remedy=f"checkpoint.fallback=previous continues from step {newest.step}",
            )
            raise RefusedError([problem])
        return Choice(newest)
    return Choice(newest, tuple(available[-2::-1]), tuple(newer))


def _steps(checkpoints: list[Committed]) -> str:
    if not checkpoints:
        return "no whole checkpoint"
    return "checkpoints of the steps " + ", ".join(str(checkpoint.step) for checkpoint in checkpoints)


def _named(damaged: list[Damaged]) -> str:
    return f"; not whole: {', '.join(map(str, damaged))}" if damaged else ""
