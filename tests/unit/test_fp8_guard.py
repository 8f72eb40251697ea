"""The guard of narrow formats, as arithmetic: who goes to BF16, who comes back, and when."""

import json
import math
from dataclasses import replace

import pytest

from shardwright.conf.compose import compose
from shardwright.conf.schema import Resilience
from shardwright.pretrain.fp8_guard import Guard, Sample
from shardwright.pretrain.spikes import WARMUP_STEPS, Spikes

LAYERS = [f"decoder.layers.{number}.mlp.linear_fc1" for number in range(10)]


@pytest.fixture(scope="module")
def how() -> Resilience:
    """Limits of 1% and 50%, spikes at 1.5, one layer of ten, ten steps."""
    shares = ["resilience.fp8_guard_overflow=0.01", "resilience.fp8_guard_steps=10"]
    return compose(shares).resilience


def sample(**overflow: float) -> list[Sample]:
    """All layers, with so much overflow in some; the later ones keep less of their signal."""
    return [
        Sample(layer, "x", overflow.get(f"l{number}", 0.0), 0.0, 40.0 - number) for number, layer in enumerate(LAYERS)
    ]


def after(guard: Guard, losses: list[float], how: Resilience, step: int = 1) -> Guard:
    for number, loss in enumerate(losses):
        finite = math.isfinite(loss)
        guard = guard.after_step(loss, finite=finite, bad_layers=[], step=step + number, how=how)
    return guard


def test_a_layer_beyond_the_limit_goes_and_one_at_the_limit_stays(how: Resilience) -> None:
    assert Guard().after_sample(sample(l3=0.02, l4=0.01), 100, how).in_bf16 == [LAYERS[3]]


def test_underflow_counts_like_overflow(how: Resilience) -> None:
    assert Guard().after_sample([Sample("layer", "dy", 0.0, 0.6, 10.0)], 100, how).in_bf16 == ["layer"]


def test_it_comes_back_below_half_of_the_limit_and_not_before_its_time(how: Resilience) -> None:
    guard = Guard().after_sample(sample(l3=0.02), 100, how)
    assert guard.after_sample(sample(), 109, how).in_bf16 == [LAYERS[3]]
    assert guard.after_sample(sample(l3=0.008), 110, how).in_bf16 == [LAYERS[3]]
    assert guard.after_sample(sample(l3=0.004), 110, how).in_bf16 == []


def test_each_further_time_takes_twice_as_long(how: Resilience) -> None:
    guard, waited = Guard(), []
    step = 0
    for _ in range(3):
        guard = guard.after_sample(sample(l3=0.02), step, how)
        gone = step
        while guard.in_bf16:
            step += 1
            guard = guard.after_sample(sample(), step, how)
        waited.append(step - gone)
        step += 1
    assert waited == [10, 20, 40]


def test_a_spike_demotes_the_worst_share_of_the_next_sample_once(how: Resilience) -> None:
    calm = after(Guard(), [2.0] * WARMUP_STEPS, how)
    spiked = after(calm, [3.1], how)
    assert spiked.trouble and spiked.losses.mean == 2.0
    found = spiked.after_sample(sample(), 30, how)
    assert found.in_bf16 == [LAYERS[9]] and not found.trouble
    assert found.after_sample(sample(), 31, how).in_bf16 == [LAYERS[9]]


def test_a_rise_below_the_limit_or_a_young_run_is_no_spike(how: Resilience) -> None:
    assert not after(Guard(), [2.0] * WARMUP_STEPS + [2.9], how).trouble
    assert not after(Guard(), [2.0] * (WARMUP_STEPS - 1) + [9.0], how).trouble


def test_a_non_finite_update_is_trouble_and_leaves_the_mean_alone(how: Resilience) -> None:
    guard = after(Guard(), [2.0, math.nan], how)
    assert guard.trouble and guard.losses.mean == 2.0 and guard.losses.number == 1


def test_a_layer_that_quantised_a_nan_goes_at_once(how: Resilience) -> None:
    guard = Guard().after_step(2.0, finite=True, bad_layers=[LAYERS[1], LAYERS[1]], step=7, how=how)
    assert guard.in_bf16 == [LAYERS[1]] and not guard.trouble


def test_a_checkpoint_keeps_all_of_it(how: Resilience) -> None:
    guard = after(Guard().after_sample(sample(l3=0.02, l5=0.5), 5, how), [2.0, math.inf], how)
    assert Guard.from_json(json.loads(json.dumps(guard.to_json()))) == guard
    assert Guard.from_json({}) == Guard()


def test_a_larger_share_demotes_more(how: Resilience) -> None:
    guard = replace(Guard(), trouble="a spike")
    wide = replace(how, fp8_guard_share=0.3)
    assert guard.after_sample(sample(), 5, wide).in_bf16 == LAYERS[7:]


def test_a_rise_is_counted_from_its_first_step_and_forgotten_when_it_is_over() -> None:
    spikes = Spikes()
    for step in range(1, WARMUP_STEPS + 1):
        spikes = spikes.after_step(2.0, step, 1.5)
    for loss in (3.1, math.nan, 9.0):
        spikes = spikes.after_step(loss, step := step + 1, 1.5)
    assert (spikes.high, spikes.since, spikes.mean) == (3, WARMUP_STEPS + 1, 2.0)
    assert Spikes.from_json(json.loads(json.dumps(spikes.to_json()))) == spikes
    assert spikes.after_step(2.1, step + 1, 1.5).high == 0
