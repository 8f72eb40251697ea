"""Going back: a loss that stays high sends a run to its last good checkpoint, past the data that it rose on.

Everything happens inside of the attempt: the ranks load the newest checkpoint from before the rise, whose every byte is
compared with its digest as at a start; the samples consumed since then are never seen again (`DataPosition.skip`); rows
and checkpoints of the steps that do not count any more are put away as at a resume. The number of times is bounded by
`resilience.rollback`, and stands in the checkpoints that follow, so that a run that is restarted does not begin anew.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwright.conf.schema import Config, Resilience
from shardwright.data.loader import Batch
from shardwright.parallel.mcore import shards
from shardwright.parallel.mcore.engine import Engine
from shardwright.pretrain import checkpoint_store, metrics
from shardwright.pretrain.rank import RankContext
from shardwright.pretrain.spikes import Spikes
from shardwright.pretrain.trainer_state import TrainerState


@dataclass(frozen=True, slots=True)
class Rollback:
    """One rank's part; every method is called by all ranks together.

    Args:
        context: of the rank.
        engine: into which a checkpoint is loaded.
        feed: this rank's micro-batches from a state on.
        reason_against: why a checkpoint is not as it was written; empty where it is. All ranks call it together.
    """

    context: RankContext
    engine: Engine
    feed: Callable[[TrainerState], Iterator[list[Batch]]]
    reason_against: Callable[[Path, int], str]

    def due(self, state: TrainerState) -> bool:
        """Whether the loss has been high for so long that the run goes back, and may."""
        how = self.context.config.resilience
        return state.rollbacks < how.rollback and state.spikes.high >= how.rollback_patience

    def go_back(self, state: TrainerState) -> tuple[TrainerState, Iterator[list[Batch]] | None]:
        """Load the newest checkpoint from before the rise.

        Returns:
            Where the run stands then, and its batches from there on; the state as it was, with the rise forgotten, and
            None, where there is no such checkpoint.

        Collective: all groups; every rank calls it, and no save is in the making.
        """
        path = self._last_good(state)
        if path is None:
            if self._leads:
                self.context.events.write(
                    "rollback_impossible", state.step, reason="no checkpoint from before the rise"
                )
            return replace(state, spikes=Spikes()), None
        saved = TrainerState.read(path)
        shards.load(self.engine, path, with_rng=TrainerState.read_layout(path) == self.engine.layout)
        skipped = state.position.consumed_samples - saved.position.consumed_samples
        back = replace(
            saved, position=saved.position.skip(skipped), rollbacks=state.rollbacks + 1, fp8_guard=state.fp8_guard
        )
        if self._leads:
            self._put_away(state, back, path, skipped)
        dist.barrier(group=self.engine.control_group)
        return back, self.feed(back)

    @property
    def _leads(self) -> bool:
        return self.context.environment.rank == 0

    def _last_good(self, state: TrainerState) -> Path | None:
        """The newest whole checkpoint of a step before the rise. Collective: broadcasts from rank 0."""
        known = checkpoint_store.committed(self.context.folder.checkpoints) if self._leads else []
        least = state.step - farthest(self.context.config)
        told: list[Any] = [[each.path for each in reversed(known) if least <= each.step < state.spikes.since]]
        dist.broadcast_object_list(told, src=0, group=self.engine.control_group)
        for path in told[0]:
            reason = self.reason_against(path, state.rollbacks)
            if not reason:
                return Path(path)
            if self._leads:
                step = checkpoint_store.step_of(path)
                self.context.events.write("checkpoint_damaged", step, path=str(path), reason=reason)
        return None

    def _put_away(self, state: TrainerState, back: TrainerState, path: Path, skipped: int) -> None:
        folder, attempt = self.context.folder, self.context.attempt
        for removed in checkpoint_store.supersede(folder.checkpoints, back.step, attempt.number):
            self.context.events.write("checkpoint_superseded", back.step, path=str(removed))
        metrics.take_back(folder.metrics, back.step, removed=attempt.path / "removed_metrics.jsonl")
        metrics.take_back(folder.fp8, back.step, removed=attempt.path / "removed_fp8.jsonl")
        self.context.events.write(
            "rollback",
            state.step,
            path=str(path),
            to_step=back.step,
            loss=state.loss if state.loss is None or math.isfinite(state.loss) else None,
            mean_loss=state.spikes.mean,
            skipped_samples=skipped,
            number=back.rollbacks,
            most=self.context.config.resilience.rollback,
            lr_factor=lr_factor(back.rollbacks, self.context.config.resilience),
        )


def farthest(config: Config) -> int:
    """How many steps a run goes back at most: the newest checkpoint before the rise, or, if it is damaged, the one
    before. So many steps of samples more are prepared at the start for each time.
    """
    return 2 * config.checkpoint.save_interval + config.resilience.rollback_patience


def lr_factor(rollbacks: int, how: Resilience) -> float:
    """What the schedule's learning rate is multiplied with after so many rollbacks."""
    return float(how.rollback_lr**rollbacks)
