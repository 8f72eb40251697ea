"""What `bench step` makes of its measurements, and what it measures."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shardwright.conf import compose
from shardwright.conf.problems import RefusedError
from shardwright.pretrain import bench, bench_report, checks, machine, plan
from shardwright.pretrain.bench_report import Speed
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.schedule import next_update

PLANNED = plan.make_plan(compose.compose(["experiment=bench_8b_16l"]))
TOKENS = 4 * 8192
GPU = {"sm_clock_mhz": 1980.0, "memory_clock_mhz": None, "temperature_celsius": 45.0, "power_watts": 690.0}


def measured(loop: str, *seconds: float, warmup: int = 0, device: str = "NVIDIA H200", loss: float = 12.0) -> Speed:
    result = {
        "seconds": list(seconds),
        "processor_seconds": [each / 2 for each in seconds],
        "waits": None,
        "losses": [loss] * len(seconds),
        "device": device,
        "memory": {"allocated_bytes": 97 * 2**30, "reserved_bytes": 99 * 2**30},
        "gpus": [GPU],
    }
    return bench_report.speed_of(PLANNED, loop, warmup, result)


def a_b_b_a(*seconds: float) -> list[Speed]:
    return [measured(loop, each) for loop, each in zip(bench_report.ORDER, seconds, strict=True)]


def test_warm_up_steps_do_not_count() -> None:
    speed = measured("ours", 100.0, 50.0, 1.0, 1.2, 0.9, warmup=2)
    assert (speed.warmup_seconds, speed.step_seconds) == ([100.0, 50.0], [1.0, 1.2, 0.9])
    assert speed.tokens_per_second == TOKENS / 1.0


def test_one_disturbed_step_moves_the_spread_and_not_the_speed() -> None:
    calm, disturbed = measured("ours", *[1.0] * 10, 1.0), measured("ours", *[1.0] * 10, 9.0)
    assert calm.tokens_per_second == disturbed.tokens_per_second
    assert measured("ours", 1.0, 2.0, 3.0, 4.0, 5.0, 6.0).quantile(0.1) == pytest.approx(1.5)
    assert measured("ours", 1.0, 2.0, 3.0, 4.0, 5.0, 6.0).quantile(0.9) == pytest.approx(5.5)


def test_flops_are_causal_and_mfu_is_against_the_bf16_peak() -> None:
    speed = measured("ours", TOKENS / 26_304)  # that many tokens a second
    assert speed.tokens_per_second_per_gpu == pytest.approx(26_304)
    assert speed.tflops_per_gpu == pytest.approx(718, rel=1e-3)
    assert speed.mfu == pytest.approx(718 / 989, rel=1e-3)


def test_tokens_per_gpu_are_shared_out_over_all_ranks() -> None:
    planned = plan.make_plan(compose.compose(["experiment=bench_8b_16l", "parallel.tp=2", "cluster.ranks=2"]))
    result: dict[str, Any] = {
        "seconds": [2.0],
        "processor_seconds": [1.0],
        "losses": [1.0],
        "device": "NVIDIA H200",
        "memory": {},
        "gpus": None,
        "waits": None,
    }
    speed = bench_report.speed_of(planned, "ours", 0, result)
    assert (speed.tokens_per_second, speed.tokens_per_second_per_gpu) == (TOKENS / 2, TOKENS / 4)


def test_mfu_is_unknown_where_the_peak_is() -> None:
    assert measured("ours", 1.0, device="CPU").mfu is None


def test_drift_that_is_even_over_the_four_measurements_cancels() -> None:
    slower_by_a_hundredth = [1.0 * 1.01**number for number in range(4)]
    ratio = bench_report.compare(a_b_b_a(*slower_by_a_hundredth))
    assert ratio.pairs == pytest.approx([1.01, 1 / 1.01])
    assert ratio.overall == pytest.approx(1.0, abs=1e-12)
    assert ratio.spread == pytest.approx(0.01)


def test_a_loop_that_takes_a_tenth_longer_has_ten_elevenths_of_the_speed() -> None:
    ratio = bench_report.compare(a_b_b_a(1.1, 1.0, 1.0, 1.1))
    assert (ratio.overall, ratio.spread) == pytest.approx((1 / 1.1, 0.0))


def test_losses_that_differ_show_that_the_work_did() -> None:
    speeds = [measured(loop, 1.0, loss=12.0 if loop == "bare" else 12.12) for loop in bench_report.ORDER]
    assert bench_report.compare(speeds).loss_difference == pytest.approx(0.01)


def test_every_measured_step_is_alike_whatever_the_schedule(tmp_path: Path) -> None:
    overrides = [
        "data.global_batch_size=32",
        "data.micro_batch_size=4",
        "data.rampup_batch_size=[4,4,1000]",
        "schedule.lr_warmup_iters=null",
        "schedule.lr_warmup_samples=500",
        "schedule.end_weight_decay=0.5",
        "schedule.weight_decay_incr_style=linear",
    ]
    config = bench.measured(compose.compose(overrides), tmp_path, 7)
    updates = [next_update(step, 32 * step, config) for step in range(7)]
    assert {(update.batch_size, update.learning_rate, update.weight_decay) for update in updates} == {
        (32, config.optimizer.lr, config.optimizer.weight_decay)
    }
    assert checks.config_problems(config) == []


def test_what_is_measured_has_neither_text_nor_evaluation_nor_checkpoints(tmp_path: Path) -> None:
    overrides = ["experiment=quickstart", "schedule.lr_warmup_iters=100", "checkpoint.load=somewhere"]
    config = bench.measured(compose.compose(overrides), tmp_path, 7)
    assert checks.config_problems(config) == []
    assert (config.run.dir, config.data.source.name, config.schedule.train_iters) == (str(tmp_path), "mock", 7)
    assert (config.schedule.eval_interval, config.checkpoint.save_interval, config.checkpoint.load) == (0, 0, None)


def test_the_table_and_the_json_show_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = a_b_b_a(1.1, 1.0, 1.0, 1.1)
    ratio = bench_report.compare(speeds)
    bench_report.show(PLANNED, speeds, ratio)
    text = capsys.readouterr().out
    for words in ("4.54B", "1100.0", "32,768", "97.0 GiB", "1980", "690", "0.9091 ± 0.0000"):
        assert words in text
    found = json.loads(json.dumps(bench_report.as_json(PLANNED, machine.detect({}), 0, speeds, ratio)))
    assert found["ratio"]["overall"] == ratio.overall
    assert [each["loop"] for each in found["measurements"]] == list(bench_report.ORDER)
    assert found["measurements"][0]["median_seconds"] == 1.1
    assert found["measurements"][0]["gpus"][0]["power_watts"] == 690.0
    assert found["packages"]["megatron-core"] and found["plan"]["layout"]["world_size"] == 1


def test_no_ratio_is_claimed_of_one_loop(capsys: pytest.CaptureFixture[str]) -> None:
    bench_report.show(PLANNED, [measured("ours", 1.0)], None)
    assert "bare" not in capsys.readouterr().out
    assert bench_report.as_json(PLANNED, Machine(), 0, [measured("ours", 1.0)], None)["ratio"] is None


QUICKSTART = ["experiment=bench_quickstart", "parallel.tp=1", "parallel.sp=false", "cluster.ranks=1"]
FAKE_RANK = """
import json, pathlib, sys
attempt = pathlib.Path(sys.argv[1])
loop = json.loads((attempt / "launch.json").read_text())["loop"]
seconds = {"ours": 1.25, "bare": 1.0}[loop]
result = {"seconds": [9.0, seconds, seconds], "processor_seconds": [1.0] * 3, "waits": None, "losses": [7.0] * 3}
result |= {"device": "CPU", "memory": {"a": 1}, "gpus": None}
(attempt / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def empty_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def run_with(rank: str, monkeypatch: pytest.MonkeyPatch, against: str | None = "bare") -> int:
    monkeypatch.setattr(bench, "RANK_COMMAND", (sys.executable, "-P", "-c", rank))
    return bench.bench_step(QUICKSTART, bench.Options(against=against, warmup=1, steps=2, as_json=True))


def test_every_measurement_has_ranks_of_its_own_and_the_folder_goes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, empty_temporary_folder: Path
) -> None:
    assert run_with(FAKE_RANK, monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["loop"] for each in found["measurements"]] == ["ours", "bare", "bare", "ours"]
    assert found["ratio"]["pairs"] == [0.8, 0.8]
    assert list(empty_temporary_folder.iterdir()) == []


def test_without_against_only_ours_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, empty_temporary_folder: Path
) -> None:
    assert run_with(FAKE_RANK, monkeypatch, against=None) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["loop"] for each in found["measurements"]] == ["ours"] and found["ratio"] is None


def test_a_sweep_is_a_table_with_every_point_over_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, empty_temporary_folder: Path
) -> None:
    slower_for_more_chunks = FAKE_RANK.replace(
        "seconds = ",
        "import yaml; chunks = yaml.safe_load((attempt / 'config.yaml').read_text())['execution']"
        "['cross_entropy_chunks']\nif chunks == 4: sys.exit(9)\nseconds = chunks * ",
    )
    monkeypatch.setattr(bench, "RANK_COMMAND", (sys.executable, "-P", "-c", slower_for_more_chunks))
    points = [*QUICKSTART, "execution.cross_entropy_chunks=1,2,4"]
    assert bench.bench_step(points, bench.Options(warmup=1, steps=2), multirun=True) == 3
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if "chunks=" in line]
    assert [row[-1] for row in rows] == ["1.0000", "0.5000", "3"], out
    assert rows[2][-2] == "exit"


def test_a_sweep_with_a_point_that_is_refused_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RANK_COMMAND", (sys.executable, "-c", "raise SystemExit(9)"))
    with pytest.raises(RefusedError, match="cross_entropy_chunks"):
        bench.bench_step([*QUICKSTART, "execution.cross_entropy_chunks=1,3"], bench.Options(), multirun=True)


def test_a_rank_that_fails_ends_the_benchmark_with_its_last_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, empty_temporary_folder: Path
) -> None:
    assert run_with("import sys; print('out of memory'); sys.exit(9)", monkeypatch) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {"overrides": QUICKSTART, "exit_code": 3}
    assert "rank 0 failed: exit code 9" in err and "out of memory" in err
    assert list(empty_temporary_folder.iterdir()) == []
