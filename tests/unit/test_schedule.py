"""The learning rate is a pure function of the update."""

import pytest

from shardwright.conf.compose import compose
from shardwright.pretrain.schedule import learning_rate

BASE = ["optimizer.lr=1e-3", "optimizer.min_lr=1e-4", "schedule.train_iters=20", "schedule.lr_warmup_iters=5"]


def rates(*overrides: str) -> list[float]:
    config = compose([*BASE, *overrides])
    return [learning_rate(k, config.schedule, config.optimizer) for k in range(1, config.schedule.train_iters + 1)]


def test_the_first_update_already_moves() -> None:
    assert rates()[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])


def test_without_warm_up_the_first_update_decays_from_the_peak() -> None:
    assert rates("schedule.lr_warmup_iters=0", "schedule.lr_decay_style=constant") == [1e-3] * 20
    assert 9.9e-4 < rates("schedule.lr_warmup_iters=0")[0] < 1e-3


def test_cosine_ends_at_min_lr_and_is_halfway_in_the_middle() -> None:
    curve = rates("schedule.lr_warmup_iters=0")
    assert curve[-1] == pytest.approx(1e-4)
    assert curve[9] == pytest.approx((1e-3 + 1e-4) / 2)
    assert curve == sorted(curve, reverse=True)


def test_update_13_of_the_published_curve() -> None:
    # warm-up 5, 20 updates, 1e-3 to 1e-4: the value that a resumed run must use again
    assert rates()[12] == pytest.approx(5.02962e-4, rel=1e-5)


def test_after_the_decay_the_rate_stays_at_min_lr() -> None:
    assert rates("schedule.lr_decay_iters=10")[9:] == pytest.approx([1e-4] * 11)


def test_constant_stays_at_the_peak() -> None:
    assert rates("schedule.lr_decay_style=constant")[4:] == [1e-3] * 16
