"""Learning rate, weight decay and batch size as pure functions: nothing to save, nothing to restore, nothing to drift.

Convention: update k = 1, 2, ... turns step k-1 into step k and uses `learning_rate(k, ...)` and `weight_decay(k, ...)`;
metrics.jsonl logs these very values. All curves are megatron-core's at its step number k, while megatron-core's own
update k uses number k-1: there the first update has the learning rate 0 and moves nothing, here it already moves.

Sources: the curves are those of megatron-core 0.19.2, optimizer_param_scheduler.py, `get_lr` and `get_wd`. Linear
warm-up: Goyal et al., arXiv:1706.02677. Cosine: Loshchilov and Hutter, arXiv:1608.03983, eq. 5, without restarts.
WSD (warm-up, stable, decay): Hu et al., arXiv:2404.06395; its decay by 1 - sqrt: Hägele et al., arXiv:2405.18392.
Inverse square root: Vaswani et al., arXiv:1706.03762, eq. 3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.conf.choices import LrDecayStyle, WeightDecayIncrStyle
from shardwright.conf.schema import Config
from shardwright.data.batch_size import BatchSizes


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step is told."""

    number: int
    """From 1; the update turns step `number - 1` into step `number`."""
    batch_size: int
    """Samples over all data-parallel ranks."""
    learning_rate: float
    weight_decay: float


def next_update(step: int, consumed_samples: int, config: Config) -> Update:
    """The update that follows after `step` steps, which consumed `consumed_samples`."""
    number, batch_size = step + 1, BatchSizes.of(config.data).at(consumed_samples)
    return Update(
        number=number,
        batch_size=batch_size,
        learning_rate=learning_rate(number, consumed_samples + batch_size, config),
        weight_decay=weight_decay(number, config),
    )


def learning_rate(update: int, consumed_samples: int, config: Config) -> float:
    """Learning rate that update `update` (from 1) uses.

    After `lr_decay_iters` updates the rate stays at `optimizer.min_lr` (with constant decay: at `optimizer.lr`).

    Args:
        update: from 1.
        consumed_samples: samples that are consumed when the update is done.
        config: a configuration that the rules have passed.
    """
    assert update >= 1, f"updates count from 1, got {update}"
    schedule, peak, least = config.schedule, config.optimizer.lr, config.optimizer.min_lr
    warmup, end = warmup_updates(config), decay_updates(config)
    done, length = update, warmup
    if schedule.lr_warmup_samples is not None:
        done, length = consumed_samples, schedule.lr_warmup_samples
    if done <= length:
        return peak * done / length
    if schedule.lr_decay_style is LrDecayStyle.constant:
        return peak
    if update > end:
        return least
    if schedule.lr_decay_style is LrDecayStyle.inverse_square_root:
        return max(least, peak * math.sqrt(min(1.0, max(warmup, 1) / update)))
    fall, begin = schedule.lr_decay_style.name, warmup
    if schedule.lr_decay_style is LrDecayStyle.WSD:
        assert schedule.lr_wsd_decay_iters is not None, "a rule refuses WSD without the length of its decay"
        fall, begin = schedule.lr_wsd_decay_style.name, end - schedule.lr_wsd_decay_iters
    progress = max(0.0, (update - begin) / max(1, end - begin))
    return least + _FALL[fall](progress) * (peak - least)


def weight_decay(update: int, config: Config) -> float:
    """Weight decay that update `update` (from 1) uses; the last one of the run uses `end_weight_decay`."""
    schedule, start = config.schedule, config.optimizer.weight_decay
    if schedule.end_weight_decay is None or schedule.weight_decay_incr_style is WeightDecayIncrStyle.constant:
        return start
    progress = min(1.0, update / schedule.train_iters)
    return start + (1.0 - _FALL[schedule.weight_decay_incr_style.name](progress)) * (schedule.end_weight_decay - start)


def warmup_updates(config: Config) -> int:
    """Updates of the warm-up; 0 for none."""
    schedule = config.schedule
    if schedule.lr_warmup_samples is not None:
        return BatchSizes.of(config.data).steps_to(schedule.lr_warmup_samples)
    if schedule.lr_warmup_fraction is not None:
        return round(schedule.lr_warmup_fraction * decay_updates(config))
    return schedule.lr_warmup_iters or 0


def decay_updates(config: Config) -> int:
    """The update that ends the decay of the learning rate, counted from the beginning of the run."""
    schedule = config.schedule
    return schedule.train_iters if schedule.lr_decay_iters is None else schedule.lr_decay_iters


_FALL: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Curves from 1 to 0 while progress goes from 0 to 1, by megatron-core's names."""
