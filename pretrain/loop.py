"""The loop: one screen, nothing hidden. Every rank runs it; all decisions in it are the same on all ranks.

Step s of the file names is the state after s optimizer steps; update k (from 1) turns step k-1 into step k.
"""

import gc
import math
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from shardwright.conf.choices import NonFinite, NonFiniteAmax
from shardwright.data.loader import Batch
from shardwright.parallel.mcore.engine import Engine, StepResult
from shardwright.pretrain import heartbeat
from shardwright.pretrain.checkpoint import Checkpoints
from shardwright.pretrain.faults import TrainingFault
from shardwright.pretrain.fp8_watch import Fp8Watch
from shardwright.pretrain.plan import Plan, peak_flops
from shardwright.pretrain.rank import RankContext
from shardwright.pretrain.rollback import Rollback, lr_factor
from shardwright.pretrain.schedule import Update, next_update
from shardwright.pretrain.stragglers import Stragglers
from shardwright.pretrain.trainer_state import TrainerState

_NAMED = 8
"""Tensors that a message names."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """What the loop works with; built by `run`."""

    context: RankContext
    plan: Plan
    engine: Engine
    training_batches: Iterator[list[Batch]]
    evaluation_batches: Callable[[], Iterator[list[Batch]]] | None
    """The first `eval_iters` global batches of the validation split, anew at every call; None never evaluates."""
    checkpoints: Checkpoints
    stragglers: Stragglers
    fp8: Fp8Watch
    rollback: Rollback

    def train(self, state: TrainerState) -> tuple[str, TrainerState]:
        """Train from `state` to the last step, or to a stop request.

        Returns:
            "done" or "stopped", and where the run stands; in both cases that state is saved, and durable.

        Raises:
            TrainingFault: a loss or gradient norm that is not finite, before anything of it is saved, or a checkpoint
                that could not be written; on all ranks alike.
        """
        config, schedule = self.context.config, self.context.config.schedule
        saved_step, stopped = state.step, False
        while state.step < schedule.train_iters and not stopped:
            state, stopped = self.step(state)
            if self.rollback.due(state) and not stopped:
                state = self._go_back(state)
                continue
            last, validation_loss = state.step == schedule.train_iters or stopped, None
            if self.evaluation_batches and self._due(schedule.eval_interval, state.step, last and not stopped):
                began = time.monotonic()
                self.context.heart.beat(heartbeat.EVALUATION)
                validation_loss = self._evaluate(state, self.evaluation_batches())
                self.context.deadline.took("evaluation", time.monotonic() - began)
            if self._due(config.checkpoint.save_interval, state.step, last):
                self.context.heart.beat(heartbeat.SAVING)
                self.checkpoints.save(state, validation_loss)
                saved_step = state.step
            self._warn_of_a_short_notice(state.step)
        self.context.heart.beat(heartbeat.SAVING)
        self.checkpoints.finish()
        assert saved_step == state.step, "the last step was not saved"
        return ("stopped" if state.step < schedule.train_iters else "done"), state

    def _go_back(self, state: TrainerState) -> TrainerState:
        """Leave a rise of the loss behind, before anything of it is saved; where the run stands then."""
        self.context.heart.beat(heartbeat.SAVING)
        self.checkpoints.finish()
        state, batches = self.rollback.go_back(state)
        if batches is not None:
            self.training_batches = batches
            self.fp8.go_back(state.fp8_guard)
        return state

    def step(self, state: TrainerState) -> tuple[TrainerState, bool]:
        """One update, with all that belongs to every step and nothing that belongs to some.

        Returns:
            Where the run stands then, and whether a rank was asked to stop.
        """
        config = self.context.config
        started, update = time.monotonic(), next_update(state.step, state.position.consumed_samples, config)
        self.context.heart.beat(heartbeat.DATA, update.number)
        how = config.resilience
        update = replace(update, learning_rate=update.learning_rate * lr_factor(state.rollbacks, how))
        self.fp8.before_step(update.number, state.fp8_guard)
        self.stragglers.works()
        result = self.engine.train_step(next(self.training_batches), update.learning_rate, update.weight_decay)
        self.stragglers.works()
        finite = self._judge_amaxes(result, update.number)
        finite = self._judge(result, update.number) and finite
        state = state.after_step(
            update.batch_size, result.num_tokens, updated=result.updated, finite=finite, loss=result.loss
        )
        spikes = state.spikes.after_step(result.loss, state.step, how.rollback_spike, finite=finite)
        state = replace(state, spikes=spikes)
        seconds = time.monotonic() - started
        state = self.fp8.after_step(state, result, finite=finite, seconds=seconds)
        self.context.deadline.took("step", seconds)
        self._report(state, result, update, seconds)
        if config.execution.gc_interval and state.step % config.execution.gc_interval == 0:
            gc.collect()
        self.stragglers.waits()
        stop = self._agree()
        slow = self.stragglers.end_step(time.monotonic() - started)
        if slow is not None:
            self.context.events.write("straggler", state.step, **slow)
        return state, stop

    @staticmethod
    def _due(interval: int, step: int, last: bool) -> bool:
        return last or (interval > 0 and step % interval == 0)

    def _judge(self, result: StepResult, update: int) -> bool:
        """Whether the update's loss and gradient norm are finite; where not, the weights have not moved.

        Raises:
            TrainingFault: they are not, under policy stop; on all ranks alike, before anything is saved.
        """
        ranks = result.non_finite_ranks
        if ranks is None:
            return True
        where = f"on rank {', '.join(map(str, ranks))}" if ranks else "after the reduction over all ranks"
        what = "loss" if ranks or not math.isfinite(result.loss) else "gradient norm"
        value = result.loss if what == "loss" else result.grad_norm
        text = f"update {update}: the {what} is {value} {where}"
        if self.context.config.resilience.on_non_finite is NonFinite.stop:
            self.checkpoints.finish()  # of an earlier step: all ranks are well, and here together
            raise TrainingFault(f"{text}; the update was not made and nothing of it is saved")
        if self.context.environment.rank == 0:
            self.context.events.write("update_skipped", update, reason=text)
        return False

    def _judge_amaxes(self, result: StepResult, update: int) -> bool:
        """Whether all that was quantised was finite, or the update was made all the same.

        Raises:
            TrainingFault: it was not, under policy stop; on all ranks alike.
        """
        found = result.non_finite_amaxes
        if not found:
            return True
        policy = self.context.config.precision.on_non_finite_amax
        named = ", ".join(f"{tensor} on rank {rank}" for rank, tensor in found[:_NAMED])
        text = f"update {update}: quantised what is not finite: {named}" + ", ..." * (len(found) > _NAMED)
        if policy is NonFiniteAmax.stop:
            self.checkpoints.finish()
            raise TrainingFault(f"{text}; no history took it in, the update was not made and nothing of it is saved")
        if self.context.environment.rank == 0:
            kept = policy is NonFiniteAmax.keep_scale
            self.context.events.write("non_finite_amax" if kept else "update_skipped", update, reason=text)
        return policy is NonFiniteAmax.keep_scale

    def _agree(self) -> bool:
        """Whether any rank was asked to stop; and a checkpoint that all ranks have written is committed.

        Collective: all-reduce(MAX) over the world's gloo group, a few microseconds per step on one node.
        """
        self.context.heart.beat(heartbeat.AGREEMENT)
        asked = self.context.stop_requested() or self.context.deadline.near()
        own = torch.tensor([int(asked), self.checkpoints.standing()])
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.engine.control_group)
        stop, worst = own.tolist()
        self.context.heart.beat(heartbeat.SAVING)
        self.checkpoints.settle(worst)
        return bool(stop)

    def _warn_of_a_short_notice(self, step: int) -> None:
        """Say once that Slurm's notice before the end is shorter than what a save has taken."""
        deadline, given = self.context.deadline, self.context.config.cluster.signal_seconds
        needed, save = deadline.needed_seconds, self.checkpoints.longest_seconds
        if save <= deadline.longest.get("save", 0.0):
            return
        deadline.took("save", save)
        if (
            self.context.environment.rank == 0
            and deadline.end is not None
            and needed <= given < deadline.needed_seconds
        ):
            self.context.events.write("notice_too_short", step, needed=deadline.needed_seconds, given=given)

    def _evaluate(self, state: TrainerState, batches: Iterator[list[Batch]]) -> float:
        loss, num_tokens = self.engine.evaluate(batches)
        if num_tokens == 0:
            raise TrainingFault(f"step {state.step}: the evaluation batches hold no unmasked token")
        if self.context.environment.rank == 0:
            samples = self.context.config.schedule.eval_iters * self.plan.batch.global_batch_size
            self.context.events.write("eval", state.step, loss=loss, samples=samples, tokens=num_tokens)
        return loss

    def _report(self, state: TrainerState, result: StepResult, update: Update, seconds: float) -> None:
        if self.context.metrics is None:
            return
        self.context.fence.check()
        tokens_per_second = update.batch_size * self.context.config.data.seq_length / seconds
        rank_flops = tokens_per_second * self.plan.flops_per_token / self.plan.layout.world_size
        peak = peak_flops(self.engine.device_name)
        row: dict[str, Any] = {
            "step": state.step,
            "loss": result.loss,
            "lr": update.learning_rate,
            "weight_decay": update.weight_decay,
            "batch_size": update.batch_size,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "tokens": state.trained_tokens,
            "tokens_per_second": tokens_per_second,
            "tflops": rank_flops / 1e12,
            "mfu": rank_flops / peak if peak else None,
            "memory_bytes": _peak_memory_bytes(self.engine.device),
            "skipped_updates": state.skipped_updates,
            "non_finite_updates": state.non_finite_updates,
            "consumed_samples": state.position.consumed_samples,
            "step_seconds": seconds,
            "checkpoint_stall_seconds": self.checkpoints.take_stall_seconds(),
            **result.expert_losses,
            **result.expert_load,
        }
        if self.context.config.resilience.fp8_guard:
            row["bf16_layers"] = len(state.fp8_guard.in_bf16)
        self.context.metrics.append(row)


def _peak_memory_bytes(device: torch.device) -> int:
    """Largest allocation of this rank so far: of the GPU's memory, or the process's resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
