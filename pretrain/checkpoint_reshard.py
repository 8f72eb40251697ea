"""`shardwright checkpoint reshard`: a checkpoint in other files, for a layout that is yet to come, on one process.

A checkpoint loads in every layout as it is, so nothing *has* to be resharded. What this gives: the new layout is judged
by all rules before a node of it is there; every byte is compared with its digest; and instead of as many files as ranks
once wrote, or one, there are as many as the new ranks can read at once. The pieces of tensors are copied as they are,
one at a time, and nothing of them is unpickled.

Random states stay too: they count where the layout is that of the run that saved them.
"""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from shardwright.conf import compose
from shardwright.conf.keys import ResumePolicy
from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import Config
from shardwright.pretrain import checkpoint_choice, checkpoint_exchange, checkpoint_store, checks

LEAST_FILE_BYTES = 1 << 24
"""Smaller files are not worth opening, however many ranks there are."""


def reshard(
    path: Path, target: Path, step: int | None, overrides: Sequence[str], *, least_file_bytes: int = LEAST_FILE_BYTES
) -> Path:
    """Write a checkpoint anew, in files for the ranks of another layout.

    Args:
        path: a run's folder, its checkpoints' folder, or one checkpoint.
        target: folder that gets the checkpoint, for `checkpoint.load=TARGET`.
        step: of these; None for the newest whole one.
        overrides: in which keys the run will differ that goes on from it; such as it may change freely.
        least_file_bytes: no file is made smaller, for the sake of more files.

    Returns:
        The new checkpoint.

    Raises:
        RefusedError: there is no such checkpoint, `target` has one of its step, or the configuration breaks a rule.
        DamagedError: its content is not what was written.
    """
    source = checkpoint_exchange.whole(path, step)
    saved = compose.load(source / checkpoint_store.CONFIG)
    config = _changed(saved, overrides)
    refuse(checks.config_problems(config))
    refuse(checkpoint_choice.moved_buckets(source, saved, config))
    told = checkpoint_store.trainer(source)
    final = checkpoint_store.step_folder(target, told["step"])
    if final.exists():
        raise RefusedError([Problem(key="TARGET", value=target, rule=f"it already holds {final.name}")])
    checkpoint_exchange.use_cpu()
    from shardwright.parallel.mcore.tensor_files import copy_pieces

    num_bytes = sum(entry["bytes"] for entry in checkpoint_store.manifest(source).values())
    num_files = max(1, min(config.world_size, num_bytes // least_file_bytes))
    folder = checkpoint_store.begin(target, told["step"])
    written = copy_pieces(source, folder, num_files)
    shutil.copy(source / "metadata.json", folder)
    return checkpoint_store.commit(folder, told, written, config=compose.dump(config)).path


def _changed(saved: Config, overrides: Sequence[str]) -> Config:
    """The configuration of a checkpoint with some keys changed, of those that a run may change freely."""
    composed = compose.compose(overrides)
    policies = {each.key: each.policy for each in compose.differences(saved, composed)}
    problems, changes = [], dict[str, dict[str, object]]()
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        if key not in compose.schema_keys() or policies.get(key, ResumePolicy.free) is not ResumePolicy.free:
            rule = "is no key that a run may change freely when it goes on"
            problems.append(Problem(key=key, rule=rule, remedy="for example parallel.tp=4 cluster.ranks=16"))
            continue
        section, name = key.split(".")
        changes.setdefault(section, {})[name] = getattr(getattr(composed, section), name)
    refuse(problems)
    return dataclasses.replace(
        saved,
        **{section: dataclasses.replace(getattr(saved, section), **values) for section, values in changes.items()},
    )
