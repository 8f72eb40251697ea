"""Transformer Engine's FP8 on one GPU: which layers step out, what histories take in, what is sampled and guarded.

`tests/distributed` has the same statements over several ranks, with the emulation.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ..distributed import commands
from .one_rank import OneRank, in_its_own_process, step_of

pytestmark = pytest.mark.gpu

RECIPES = ["fp8_delayed", "fp8_guide", "fp8_current", "fp8_blockwise"]
FP8 = 2e-2
"""Relative difference of two losses that E4M3 may come to in six steps."""
ONE_MICRO_BATCH = "data.global_batch_size=2"
LAYER = "decoder.layers.1.mlp.linear_fc2"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_whose_every_layer_steps_out_is_the_bf16_run(rank: OneRank, recipe: str) -> None:
    plain = rank.train()
    stepped_out = rank.train(f"precision={recipe}", "precision.bf16_layers=['*']")
    assert (stepped_out.losses, stepped_out.norms) == (plain.losses, plain.norms)


@pytest.mark.parametrize("recipe", RECIPES)
def test_some_layers_in_bf16_give_a_run_between_the_two(rank: OneRank, recipe: str) -> None:
    narrow = rank.train(f"precision={recipe}")
    some = rank.train(f"precision={recipe}", "precision.bf16_layers=['decoder.layers.0.*','*.linear_fc2']")
    assert some.losses != narrow.losses
    assert some.losses == pytest.approx(narrow.losses, rel=FP8)


def test_histories_of_layers_in_bf16_stand_still_and_the_others_go_on(rank: OneRank) -> None:
    engine = rank.engine("precision=fp8_delayed", "precision.bf16_layers=['*.linear_fc2']")
    for number in range(3):
        engine.train_step(step_of(engine.config, number), 1e-3, 0.1)
    state = engine.narrow.amax_state()
    amaxes = {name: bool(tensor.any()) for name, tensor in state.items() if name.endswith("scaling_fwd amaxes")}
    assert set(engine.narrow.in_bf16()) == {f"decoder.layers.{number}.mlp.linear_fc2" for number in range(4)}
    assert {name for name, any_is_there in amaxes.items() if any_is_there} == {
        f"decoder.layers.{number}.{layer} scaling_fwd amaxes"
        for number in range(4)
        for layer in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
    }
    del engine
    rank.forget()


def test_samples_see_what_transformer_engine_quantises(rank: OneRank) -> None:
    """Its own histories have the amax of the very step that was sampled."""
    from shardwright.parallel.mcore.fp8_samples import Samples
    from shardwright.parallel.mcore.te_fp8 import BACKWARD, FORWARD, OPERANDS

    engine = rank.engine("precision=fp8_delayed", ONE_MICRO_BATCH)
    samples = Samples(engine.narrow, engine.config.precision, engine.layout, 0, engine.control_group)
    for number in range(3):
        engine.train_step(step_of(engine.config, number), 1e-3, 0.1)
    samples.begin()
    engine.train_step(step_of(engine.config, 3), 1e-3, 0.1)
    measured = samples.end()
    assert measured is not None and len(measured) == 4 * 4 * 3
    for (layer, operand), (numbers, scale, in_bf16) in measured.items():
        direction = BACKWARD if operand == "dy" else FORWARD
        state = engine.narrow.layers[layer].fp8_meta[direction]
        kept = state.amax_history[-1, OPERANDS[direction].index(operand)].item()
        tolerance = 0.0 if operand == "w" else 2**-7  # a norm is computed again, and BF16 has 8 bits
        assert numbers.amax == pytest.approx(kept, rel=tolerance, abs=0.0), (layer, operand)
        assert scale is not None and scale > 0 and not in_bf16
        assert numbers.sqnr_db is not None and 20 < numbers.sqnr_db < 40, (layer, operand)
    del engine, samples
    rank.forget()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_its_samples(rank: OneRank, recipe: str) -> None:
    from shardwright.parallel.mcore.fp8_samples import Samples

    engine = rank.engine(f"precision={recipe}")
    samples = Samples(engine.narrow, engine.config.precision, engine.layout, 0, engine.control_group)
    engine.train_step(step_of(engine.config, 0), 1e-3, 0.1)
    samples.begin()
    engine.train_step(step_of(engine.config, 1), 1e-3, 0.1)
    measured = samples.end()
    assert measured is not None and len(measured) == 4 * 4 * 3
    assert all(numbers.sqnr_db is not None and numbers.sqnr_db > 20 for numbers, _, _ in measured.values())
    assert all((scale is not None) == (recipe in ("fp8_delayed", "fp8_guide")) for _, scale, _ in measured.values())
    del engine, samples
    rank.forget()


def test_what_is_not_finite_is_named_moves_no_weight_and_enters_no_history(rank: OneRank) -> None:
    engine = rank.engine("precision=fp8_delayed", "precision.on_non_finite_amax=skip", ONE_MICRO_BATCH)
    for number in range(3):
        engine.train_step(step_of(engine.config, number), 1e-3, 0.1)
    before = {name: tensor.clone() for name, tensor in engine.narrow.amax_state().items()}
    weights = [parameter.detach().clone() for parameter in engine.model.parameters()]

    def spoil(module: Any, inputs: Any) -> Any:
        return (inputs[0] * float("inf"), *inputs[1:])

    hook = engine.narrow.layers[LAYER].register_forward_pre_hook(spoil)
    result = engine.train_step(step_of(engine.config, 3), 1e-3, 0.1)
    hook.remove()
    after = engine.narrow.amax_state()
    assert (0, f"{LAYER} x") in result.non_finite_amaxes
    assert (0, f"{LAYER} w") not in result.non_finite_amaxes
    assert not result.updated
    assert all(map(torch.equal, weights, (parameter.detach() for parameter in engine.model.parameters())))
    assert all(tensor.isfinite().all() for tensor in after.values())
    column = before[f"{LAYER} scaling_fwd scales"], after[f"{LAYER} scaling_fwd scales"]
    assert column[0][0] == column[1][0], "the scale of the operand that was not finite stays"
    again = engine.train_step(step_of(engine.config, 4), 1e-3, 0.1)
    assert again.non_finite_amaxes == () and again.updated
    del engine, hook, weights
    rank.forget()


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current"])
def test_recomputation_changes_neither_losses_nor_histories(recipe: str) -> None:
    overrides = ("execution=deterministic", f"precision={recipe}")
    full = ("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1")
    plain, recomputed = in_its_own_process(*overrides), in_its_own_process(*overrides, *full)
    assert (recomputed.losses, recomputed.norms) == (plain.losses, plain.norms)
    assert recomputed.amaxes == plain.amaxes


@pytest.mark.parametrize(
    "overrides",
    [
        "precision=fp8_delayed precision.fp8_dot_product_attention=true",
        "precision=fp8_delayed precision.fp8_param_gather=true",
        "precision=fp8_current precision.fp8_param_gather=true",
        "precision=fp8_blockwise precision.fp8_param_gather=true",
    ],
)
def test_attention_and_parameters_in_fp8_train_like_bf16(rank: OneRank, overrides: str) -> None:
    plain, narrow = rank.train(), rank.train(*overrides.split())
    assert narrow.losses == pytest.approx(plain.losses, rel=FP8)
    assert narrow.losses != plain.losses


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "fp8_blockwise"])
def test_parameters_in_fp8_come_back_from_a_checkpoint_bit_for_bit(rank: OneRank, tmp_path: Path, recipe: str) -> None:
    from shardwright.parallel.mcore import shards

    overrides = (f"precision={recipe}", "precision.fp8_param_gather=true")
    engine = rank.engine(*overrides)
    for number in range(3):
        engine.train_step(step_of(engine.config, number), 1e-3, 0.1)
    (tmp_path / "saved").mkdir()
    shards.save(engine, tmp_path / "saved")
    saved = {name: weight.detach().float().clone() for name, weight in engine.model.named_parameters()}
    scales = {name: value.clone() for name, value in engine.narrow.amax_state().items() if "scales" in name}
    goes_on = engine.train_step(step_of(engine.config, 3), 1e-3, 0.1).loss
    del engine
    rank.forget()
    engine = rank.engine(*overrides, "run.seed=5")
    shards.load(engine, tmp_path / "saved", with_rng=True)
    for name, weight in engine.model.named_parameters():
        assert torch.equal(weight.detach().float(), saved[name]), name
    for name, value in engine.narrow.amax_state().items():
        if name in scales:
            assert torch.equal(value, scales.pop(name)), name
    assert all("core_attention" in name for name in scales), "what the new engine has not called yet"
    assert engine.train_step(step_of(engine.config, 3), 1e-3, 0.1).loss == pytest.approx(goes_on, rel=1e-5)
    del engine
    rank.forget()


RUN = [
    *("model=tiny", "data.seq_length=256", "data.micro_batch_size=8", "data.global_batch_size=32"),
    *("cluster.gpu=auto", "cluster.ranks=1", "schedule.lr_warmup_iters=2", "schedule.lr_decay_iters=30"),
    *("schedule.eval_interval=0", "checkpoint.save_interval=0", "data=mock", "precision=fp8_delayed"),
]


def train(folder: Path, *overrides: str, fault: str = "") -> None:
    planted = str(Path(commands.__file__).with_name("planted"))
    variables = {"PLANTED_FAULT": fault, "PYTHONPATH": f"{planted}:{os.environ['PYTHONPATH']}"} if fault else {}
    command = [sys.executable, "-P", "-m", "shardwright.pretrain", "train", f"run.dir={folder}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **variables})
    assert done.returncode == 0, done.stdout + done.stderr


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_guard_sends_a_layer_with_outliers_to_bf16_and_takes_it_back(tmp_path: Path) -> None:
    guard = ("resilience.fp8_guard=true", "resilience.fp8_guard_steps=2", "telemetry.fp8_interval=2")
    limits = ("telemetry.fp8_share=1.0e6", "resilience.fp8_guard_overflow=0.05", "precision.fp8_amax_history_len=2")
    train(tmp_path / "run", *RUN, *guard, *limits, "schedule.train_iters=16", fault="0:8:quantizes_outliers")
    told = [row["data"] for row in rows(tmp_path / "run" / "events.jsonl") if row["kind"] == "fp8_guard"]
    demoted = {layer for each in told for layer in each["demoted"]}
    promoted = {layer for each in told for layer in each["promoted"]}
    assert "decoder.layers.0.mlp.linear_fc2" in demoted
    assert "decoder.layers.0.mlp.linear_fc2" in promoted
    steps = rows(tmp_path / "run" / "metrics.jsonl")
    assert any(row["bf16_layers"] for row in steps) and not steps[0]["bf16_layers"]


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current"])
def test_a_deterministic_run_that_was_stopped_has_the_losses_of_one_that_was_not(tmp_path: Path, recipe: str) -> None:
    run = [*RUN, f"precision={recipe}", "execution=deterministic"]
    train(tmp_path / "whole", *run, "schedule.train_iters=24")
    train(tmp_path / "stopped", *run, "schedule.train_iters=12")
    train(tmp_path / "stopped", "schedule.train_iters=24")
    whole, stopped = (rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped"))
    assert [row["loss"] for row in stopped] == [row["loss"] for row in whole]
    assert [row["grad_norm"] for row in stopped] == [row["grad_norm"] for row in whole]
