"""A run with emulated delayed scaling: its self-check, its samples, its guard, over a resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.pretrain import cli
from shardwright.pretrain.events import read_rows

from . import commands

FP8 = (
    *commands.SMALL,
    *commands.TWO_TENSOR_PARALLEL,
    *("precision=fp8_delayed", "precision.dtype=fp32", "precision.backend=emulated"),
    *("precision.fp8_amax_history_len=2", "schedule.eval_interval=0", "schedule.lr_decay_iters=12"),
)
LAYER = "decoder.layers.0.mlp.linear_fc2"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, cache: str) -> tuple[Path, str]:
    """Eight steps, then five more in a second attempt; at step 8 one layer quantises outliers on rank 1."""
    run_dir = tmp_path_factory.mktemp("fp8") / "run"
    guard = ("resilience.fp8_guard=true", "resilience.fp8_guard_steps=2", "telemetry.fp8_interval=2")
    limits = ("telemetry.fp8_share=1.0e6", "resilience.fp8_guard_overflow=0.05")
    overrides = (*FP8, *guard, *limits, cache, "precision.amax_check_interval=5", "schedule.train_iters=8")
    first = commands.train(run_dir, *overrides, fault="1:8:quantizes_outliers")
    assert first.code == 0, first.out
    second = commands.train(run_dir, "schedule.train_iters=13")
    assert second.code == 0, second.out
    return run_dir, first.out + second.out


def test_amaxes_are_compared_at_the_start_of_each_attempt_and_at_the_interval(guarded: tuple[Path, str]) -> None:
    checks = commands.events(guarded[0], "amax_check")
    assert [check["step"] for check in checks] == [1, 5, 9, 10]
    assert all(check["data"]["tensors"] == 8 * 3 * 2 and check["data"]["seconds"] > 0 for check in checks)


def test_the_start_table_says_who_shares_amaxes(guarded: tuple[Path, str]) -> None:
    assert "amaxes shared by tp_dp_cp [0,1]" in guarded[1]


def test_each_sample_has_a_row_for_every_operand_of_every_layer(guarded: tuple[Path, str]) -> None:
    rows = read_rows(guarded[0] / "fp8.jsonl")
    assert [(row["step"], row["layer"], row["operand"]) for row in rows] == sorted(
        (step, layer, operand)
        for step in (2, 4, 6, 8, 10, 12)
        for layer in {row["layer"] for row in rows}
        for operand in ("x", "w", "dy")
    )
    assert len({row["layer"] for row in rows}) == 8
    for row in rows:
        assert row["amax"] > 0 and 0 <= row["underflow"] <= 1 and 0 <= row["overflow"] <= 1
        assert row["bf16"] or row["staleness"] == pytest.approx(
            row["amax"] * row["scale"] / (57344.0 if row["operand"] == "dy" else 448.0)
        )
    weights = [row for row in rows if row["operand"] == "w" and not row["bf16"]]
    assert all(25 < row["sqnr_db"] < 40 for row in weights), "three bits of mantissa leave about 31 dB"


def test_what_a_sample_costs_is_told(guarded: tuple[Path, str]) -> None:
    samples = commands.events(guarded[0], "fp8_sample")
    assert [sample["step"] for sample in samples] == [2, 4, 6, 8, 10, 12]
    assert all(sample["data"]["seconds"] > 0 and sample["data"]["tensors"] == 24 for sample in samples)


def test_outliers_send_their_layer_to_bf16_and_it_comes_back_when_they_are_gone(guarded: tuple[Path, str]) -> None:
    """So do the layers beside it that the outliers reach in the forward and in the backward pass."""
    (to_bf16, back) = commands.events(guarded[0], "fp8_guard")
    assert to_bf16["step"] == 8 and LAYER in to_bf16["data"]["demoted"] and to_bf16["data"]["promoted"] == []
    assert len(to_bf16["data"]["demoted"]) < 5 and to_bf16["data"]["reason"] == "beyond the limits"
    assert (back["step"], back["data"]["demoted"], back["data"]["in_bf16"]) == (10, [], 0)
    assert back["data"]["promoted"] == to_bf16["data"]["demoted"]
    rows = [row for row in read_rows(guarded[0] / "fp8.jsonl") if row["layer"] == LAYER and row["operand"] == "x"]
    assert [row["bf16"] for row in rows] == [False, False, False, False, True, False]
    assert rows[3]["overflow"] > 0.05 > rows[2]["overflow"]


def test_a_run_that_goes_on_keeps_its_layers_in_bf16_and_says_so(guarded: tuple[Path, str]) -> None:
    number = commands.events(guarded[0], "fp8_guard")[0]["data"]["in_bf16"]
    rows = {row["step"]: row["bf16_layers"] for row in commands.rows(guarded[0])}
    assert [rows[step] for step in range(7, 12)] == [0, number, number, 0, 0]
    (told,) = (line for line in guarded[1].splitlines() if "to BF16: " in line)
    assert f"{number} layers in BF16" in guarded[1] and LAYER in told


def test_the_command_shows_the_worst_operands_and_draws_heat_maps(
    guarded: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "fp8.html"
    assert cli.main(["fp8", str(guarded[0]), "--html", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("6 samples up to step 12") and len(lines) == 1 + 1 + 10 + 1
    assert LAYER in page.read_text() and "https://" not in page.read_text().partition("<body>")[0]
    assert cli.main(["fp8", str(guarded[0]), "--json"]) == 0
    worst: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [row["sqnr_db"] for row in worst] == sorted(row["sqnr_db"] for row in worst)


def test_histograms_are_written_for_tensorboard(guarded: tuple[Path, str]) -> None:
    pytest.importorskip("tensorboard", reason="the extra `telemetry` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tags, *_) = [EventAccumulator(str(guarded[0] / "tensorboard")).Reload().Tags()["histograms"]]
    assert f"log2 of gradient/{LAYER}" in tags and len(tags) == 24


@pytest.mark.slow  # the check itself: test_amax.py
def test_a_scale_that_differs_on_one_rank_ends_the_run(tmp_path: Path, cache: str) -> None:
    run_dir = tmp_path / "run"
    overrides = (*FP8, cache, "precision.amax_check_interval=1", "schedule.train_iters=5")
    ended = commands.train(run_dir, *overrides, fault="1:3:scales_otherwise")
    assert ended.code == 3, ended.out
    (fault,) = commands.events(run_dir, "fault")
    assert fault["step"] is None or fault["data"]["exit_code"] == 3
    assert "decoder.layers.1.mlp.linear_fc1 x" in fault["data"]["error"]
    assert "not the same on rank 1 as on rank 0" in fault["data"]["error"]
    assert commands.steps(run_dir)[-1] in (2, 3) and commands.checkpoints(run_dir) == []
