"""`plan --plot`: what is drawn, and what a person reads who cannot have it."""

from pathlib import Path

import pytest

from shardwright.conf.compose import compose
from shardwright.pretrain import cli, plot, requirements

WSD = ["schedule=wsd", "schedule.train_iters=1000000", "schedule.lr_wsd_decay_iters=1000"]


def test_every_turn_of_a_curve_is_drawn_of_however_long_a_run() -> None:
    drawn = {update.number: update for update in plot.updates(compose([*WSD, "data.rampup_batch_size=[4,4,100]"]))}
    assert len(drawn) < plot.MOST_POINTS + 20
    assert {1, 10, 11, 25, 26, 999_000, 999_001, 1_000_000} <= set(drawn)
    assert (drawn[25].batch_size, drawn[26].batch_size) == (4, 8)
    assert drawn[10].learning_rate == drawn[999_000].learning_rate > drawn[999_001].learning_rate


def test_the_picture_is_one_file_that_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is missing: pip install -c constraints.txt -e '.[telemetry]'")
    path = tmp_path / "plan.html"
    assert cli.main(["plan", "--plot", str(path), "schedule.train_iters=20"]) == 0
    text = path.read_text()
    for name in ("learning rate", "weight decay", "batch size in samples"):
        assert f'"{name}"' in text
    assert "<script src=" not in text


def test_without_plotly_the_package_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(requirements, "_importable", lambda module: module != "plotly")
    assert cli.main(["plan", "--plot", str(tmp_path / "plan.html")]) == 2
    assert "pip install -c constraints.txt -e '.[telemetry]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_html_or_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["plan", "--plot", str(tmp_path / "plan.png")]) == 2
    assert "--plot plan.html" in capsys.readouterr().err
    pytest.importorskip("plotly", reason="plotly is missing: pip install -c constraints.txt -e '.[telemetry]'")
    assert cli.main(["plan", "--plot", str(tmp_path / "nowhere" / "plan.html")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
