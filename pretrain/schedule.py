"""Learning rate as a pure function of the update: nothing to save, nothing to restore, nothing to drift.

Convention: update k = 1, 2, ... uses `learning_rate(k)`, and metrics.jsonl logs that very value. The warm-up is linear
and the first update already moves: update k of W warm-up updates uses lr * k / W. (megatron-core's scheduler gives
update 1 the rate 0.) Cosine: Loshchilov and Hutter, "SGDR", arXiv:1608.03983, eq. 5, without restarts.
"""

import math

from shardwright.conf.schema import LrDecayStyle, Optimizer, Schedule


def learning_rate(update: int, schedule: Schedule, optimizer: Optimizer) -> float:
    """Learning rate that update `update` (from 1) uses.

    After `lr_decay_iters` updates the rate stays at `optimizer.min_lr` (with constant decay: at `optimizer.lr`).
    """
    assert update >= 1, f"updates count from 1, got {update}"
    warmup = schedule.lr_warmup_iters
    if update <= warmup:
        return optimizer.lr * update / warmup
    if schedule.lr_decay_style is LrDecayStyle.constant:
        return optimizer.lr
    end = schedule.train_iters if schedule.lr_decay_iters is None else schedule.lr_decay_iters
    progress = min(1.0, (update - warmup) / max(1, end - warmup))
    return optimizer.min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (optimizer.lr - optimizer.min_lr)
