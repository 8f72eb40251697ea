"""What a start means: which configuration, which checkpoint, whether anything is left to do.

It depends on the run's folder D = run.dir. Where D/config.yaml exists, the run goes on: without further overrides with
the frozen file as it is; with overrides on top of those it was first started with, so that `train run.dir=D
schedule.train_iters=2000` changes that one key, and every key that then differs is judged by its schema (free, warn,
refuse). The original never changes; what an attempt runs with is in its own folder.

`resolve` only reads, so that everything that can be refused is refused before anything is written; `begin` writes.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.conf import compose
from shardwright.conf.compose import Difference
from shardwright.conf.keys import ResumePolicy
from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import Config
from shardwright.pretrain import checkpoint_choice, checkpoint_store, checks, machine, provenance, ranks
from shardwright.pretrain.checkpoint_choice import Choice
from shardwright.pretrain.checkpoint_store import Committed
from shardwright.pretrain.folder import Attempt, RunFolder, write_atomic
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.ranks import RankEnvironment

_OF_EVERY_START = ("run.name", "run.dir", "checkpoint.load", "checkpoint.load_step")
"""They say where a run lives and what it begins from: no difference to what wrote a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a start would do."""

    config: Config
    folder: RunFolder
    differences: list[Difference]
    """Keys in which it differs from the frozen configuration."""
    since_checkpoint: list[Difference]
    """Further keys in which it differs from the configuration that wrote the checkpoint."""
    choice: Choice
    """Checkpoint to continue from, and what to take if its content is damaged."""
    machine: Machine
    finished: bool
    """Whether nothing is left to do."""

    @property
    def load(self) -> Committed | None:
        """Checkpoint to continue from; None starts at step 0."""
        return self.choice.load

    @property
    def device(self) -> str:
        """cuda or cpu."""
        return machine.device(self.config, self.machine)


def resolve(overrides: Sequence[str], environment: RankEnvironment | None) -> Start:
    """Compose, compare with the frozen configuration, check, and find the checkpoint; reads only.

    Args:
        overrides: Hydra overrides.
        environment: the rank that torchrun or srun made of this process; None if the ranks are to be started here.

    Raises:
        RefusedError: with all problems that were found.
    """
    found = machine.detect()

    def rules(config: Config) -> list[Problem]:
        started = (
            checks.own_ranks_problems(config) if environment is None else ranks.world_size_problems(environment, config)
        )
        return checks.config_problems(config) + checks.machine_problems(config, found) + started

    try:
        config = compose.compose(overrides)
    except RefusedError as error:
        raise compose.complete(error, overrides, rules) from None
    folder = RunFolder(Path(config.run.dir))
    differences: list[Difference] = []
    if folder.config.exists():
        config, differences = resumed(config, folder, overrides)
    problems = rules(config)
    since_checkpoint: list[Difference] = []
    try:
        choice = checkpoint_choice.find(config.checkpoint, folder.checkpoints)
        if choice.load is not None:
            since_checkpoint = _since(choice.load, config, folder)
    except RefusedError as error:
        problems += error.problems
    refuse(problems)
    done = choice.load is not None and choice.load.step >= config.schedule.train_iters
    return Start(
        config=config,
        folder=folder,
        differences=differences,
        since_checkpoint=[found for found in since_checkpoint if found not in differences],
        choice=choice,
        machine=found,
        finished=done and folder.status().get("state") == "done",
    )


def begin(start: Start, overrides: Sequence[str], details: Mapping[str, Any]) -> Attempt:
    """Freeze the configuration at the first start, then make the attempt; the lock must be held.

    Args:
        start: what `resolve` found.
        overrides: what was typed.
        details: what the launcher adds to `Attempt.launch`.
    """
    folder, text = start.folder, compose.dump(start.config)
    if not folder.config.exists():
        folder.freeze(text, overrides)
    candidates = [] if start.load is None else [start.load, *start.choice.fallbacks]
    told = {
        "device": start.device,
        "load": [str(checkpoint.path) for checkpoint in candidates],
        "damaged": [{"path": str(found.path), "reason": found.reason} for found in start.choice.damaged],
        **details,
    }
    attempt = folder.new_attempt(text, told)
    write_atomic(attempt.path / "provenance.json", json.dumps(provenance.gather(start.machine), indent=1) + "\n")
    folder.write_status("running", attempt)
    return attempt


def merge_overrides(saved: Sequence[str], new: Sequence[str]) -> list[str]:
    """Overrides of the first start with those of this one on top; a key that is given again counts once."""
    given = {_key(override) for override in new}
    return [override for override in saved if _key(override) not in given] + list(new)


def resumed(composed: Config, folder: RunFolder, overrides: Sequence[str]) -> tuple[Config, list[Difference]]:
    """The configuration that a run goes on with, and where it differs from the frozen one.

    Args:
        composed: what the overrides alone give; its `run.dir` is taken.
        folder: the run's folder, which has a frozen configuration.
        overrides: what was typed.

    Raises:
        RefusedError: the frozen one cannot be read, or the overrides change what may not change.
    """
    frozen = compose.load(folder.config)
    frozen = dataclasses.replace(frozen, run=dataclasses.replace(frozen.run, dir=composed.run.dir))
    if all(_key(override) == "run.dir" for override in overrides):
        return frozen, []
    same_folder = compose.override("run.dir", str(folder.path))
    present = compose.compose([*merge_overrides(folder.saved_overrides(), overrides), same_folder])
    differences = compose.differences(frozen, present)
    said, otherwise = f"the run in {folder.path} was started with", ", another run.dir starts a new run"
    refuse([_refusal(each, said, otherwise) for each in differences if each.policy is ResumePolicy.refuse])
    return present, differences


def _since(checkpoint: Committed, config: Config, folder: RunFolder) -> list[Difference]:
    """Where a start differs from the configuration that wrote the checkpoint.

    Raises:
        RefusedError: in what may not change. Of another run's checkpoint that nothing was trained for (an imported one)
            this is the model alone.
    """
    saved = compose.load(checkpoint.path / checkpoint_store.CONFIG)
    found = [each for each in compose.differences(saved, config) if each.key not in _OF_EVERY_START]
    if checkpoint.path.parent != folder.checkpoints:  # what a run's own may not change stands in its frozen file
        trained = checkpoint_store.trainer(checkpoint.path)["consumed_samples"] > 0
        fixed = [each for each in found if each.policy is ResumePolicy.refuse]
        said = f"the checkpoint {checkpoint.path} was written with"
        refuse([_refusal(each, said, "") for each in fixed if trained or each.key.startswith("model.")])
    refuse(checkpoint_choice.moved_buckets(checkpoint.path, saved, config))
    return found


def _refusal(difference: Difference, said: str, otherwise: str) -> Problem:
    saved = compose.shown(difference.saved)
    return Problem(
        key=difference.key,
        value=compose.shown(difference.present),
        rule=f"{said} {saved}, which cannot change",
        remedy=f"{difference.key}={saved} continues it{otherwise}",
    )


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")
