"""Where a run stands, as plain JSON beside the shards of a checkpoint; torch-free, read before any rank connects."""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.conf.problems import Problem, RefusedError
from shardwright.data.sampler import DataPosition
from shardwright.parallel.layout import Layout
from shardwright.pretrain import checkpoint_store
from shardwright.pretrain.fp8_guard import Guard
from shardwright.pretrain.spikes import Spikes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where a run stands after `step` optimizer steps; equal on all ranks."""

    step: int = 0
    position: DataPosition = field(default_factory=DataPosition)
    trained_tokens: int = 0
    """Unmasked tokens that updates were computed from."""
    skipped_updates: int = 0
    """Steps whose update was left out: fp16 overflows, and losses or norms that were not finite under policy skip."""
    non_finite_updates: int = 0
    """Of these, the ones with a loss or norm that was not finite."""
    loss: float | None = None
    """Of the last update: the mean over the unmasked tokens of its global batch."""
    fp8_guard: Guard = field(default_factory=Guard)
    """Where the guard of narrow formats stands."""
    spikes: Spikes = field(default_factory=Spikes)
    """Where the loss stands beside its mean."""
    rollbacks: int = 0
    """How often the run went back."""
    data: str = ""
    """Identity of the data that `position` is a place in (`data.source.Source.identity`)."""

    def after_step(
        self, num_samples: int, num_tokens: int, *, loss: float, updated: bool = True, finite: bool = True
    ) -> "TrainerState":
        """The state after one more step; its samples are consumed whether or not the weights moved."""
        return replace(
            self,
            step=self.step + 1,
            position=self.position.consume(num_samples),
            loss=loss,
            trained_tokens=self.trained_tokens + num_tokens * updated,
            skipped_updates=self.skipped_updates + (not updated),
            non_finite_updates=self.non_finite_updates + (not finite),
        )

    def on_data(self, identity: str) -> "TrainerState":
        """This state for training on data of this `identity`.

        Raises:
            RefusedError: the position is a place in other data.
        """
        if self.data not in ("", identity):
            rule = f"the checkpoint was trained on other data ({self.data}): its position means nothing in these"
            remedy = (
                "continue with the text and tokenizer, or the version of Python, that began the run, or begin a new run"
            )
            raise RefusedError([Problem(key="data", value=identity, rule=rule, remedy=remedy)])
        return replace(self, data=identity)

    def to_json(self, layout: Layout, attempt: int) -> dict[str, Any]:
        """As written into the checkpoint."""
        return {
            "format_version": 1,
            "step": self.step,
            "consumed_samples": self.position.consumed_samples,
            "skipped_samples": [list(skipped) for skipped in self.position.skipped],
            "trained_tokens": self.trained_tokens,
            "skipped_updates": self.skipped_updates,
            "non_finite_updates": self.non_finite_updates,
            "loss": self.loss if self.loss is None or math.isfinite(self.loss) else None,
            "fp8_guard": self.fp8_guard.to_json(),
            "spikes": self.spikes.to_json(),
            "rollbacks": self.rollbacks,
            "data": self.data,
            "layout": asdict(layout),
            "attempt": attempt,
        }

    @classmethod
    def read(cls, checkpoint: Path) -> "TrainerState":
        """From the folder of a committed checkpoint."""
        saved = checkpoint_store.trainer(checkpoint)
        skipped = tuple((first, end) for first, end in saved["skipped_samples"])
        return cls(
            step=saved["step"],
            position=DataPosition(saved["consumed_samples"], skipped),
            trained_tokens=saved["trained_tokens"],
            skipped_updates=saved["skipped_updates"],
            non_finite_updates=saved["non_finite_updates"],
            loss=saved["loss"],
            fp8_guard=Guard.from_json(saved.get("fp8_guard", {})),
            spikes=Spikes.from_json(saved.get("spikes", {})),
            rollbacks=saved.get("rollbacks", 0),
            data=saved["data"],
        )

    @staticmethod
    def read_layout(checkpoint: Path) -> Layout:
        """The layout that wrote a committed checkpoint."""
        return Layout(**checkpoint_store.trainer(checkpoint)["layout"])
