"""`train -m`: the points of Hydra's sweep grammar, each in its own folder, one after another."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwright.conf.problems import RefusedError
from shardwright.pretrain import cli, sweep

ONE_RANK = ("experiment=quickstart", "parallel.tp=1", "parallel.sp=false", "cluster.ranks=1")


def refusal(*overrides: str) -> str:
    with pytest.raises(RefusedError) as caught:
        sweep.run([*ONE_RANK, *overrides])
    return str(caught.value)


@dataclass
class Started:
    """What the started points wrote."""

    log: Path

    def read(self) -> list[list[str]]:
        return [line.split("\t") for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """Points that were started, in order; each ends with the code that its learning rate stands for."""
    program = tmp_path / "train.py"
    program.write_text(
        "import sys\n"
        "rate = [word for word in sys.argv if word.startswith('optimizer.lr=')][-1].partition('=')[2]\n"
        "open(__file__ + '.log', 'a').write('\\t'.join(sys.argv[3:]) + '\\n')\n"
        "sys.exit({'0.1': 0, '0.2': 3, '0.3': 2, '0.75': 75}[rate])\n"
    )
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {program} -m shardwright.pretrain "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.chdir(tmp_path)
    return Started(Path(f"{program}.log"))


def test_a_sweep_is_the_product_of_its_values_in_the_order_given() -> None:
    assert sweep.expand(["run.seed=1", "optimizer.lr=1e-3,2e-3", "parallel.tp=choice(1,2)"]) == [
        ["run.seed=1", "optimizer.lr=0.001", "parallel.tp=1"],
        ["run.seed=1", "optimizer.lr=0.001", "parallel.tp=2"],
        ["run.seed=1", "optimizer.lr=0.002", "parallel.tp=1"],
        ["run.seed=1", "optimizer.lr=0.002", "parallel.tp=2"],
    ]


@pytest.mark.parametrize(
    ("override", "points"),
    [
        ("run.seed=range(1,4)", ["run.seed=1", "run.seed=2", "run.seed=3"]),
        ("model=glob(mixtral_*)", ["model=mixtral_8x22b", "model=mixtral_8x7b"]),
        ("data.split=[98,1,1],[90,5,5]", ["data.split=[98,1,1]", "data.split=[90,5,5]"]),
        ("+run.name='a,b',c", ["+run.name='a,b'", "+run.name=c"]),
        ("~experiment", ["~experiment"]),
        ("run.dir='a,b'", ["run.dir='a,b'"]),
    ],
)
def test_all_of_hydras_discrete_sweeps_are_understood(override: str, points: list[str]) -> None:
    assert sweep.expand([override]) == [[point] for point in points]


def test_of_two_overrides_of_one_key_the_later_counts() -> None:
    assert sweep.expand(["run.seed=1,2", "run.seed=3"]) == [["run.seed=3"]]


@pytest.mark.parametrize(
    "override", ["optimizer.lr=interval(0,1)", "model=glob(bert*)", "optimizer.lr=1,[", "run.seed"]
)
def test_what_has_no_list_of_values_is_refused(override: str) -> None:
    with pytest.raises(RefusedError, match="cannot be swept"):
        sweep.expand([override])


def test_a_mistake_of_some_points_is_refused_with_the_point() -> None:
    message = refusal("optimizer.lr=0.1,1e", "parallel.tp=1,3", "run.seed=0")
    assert "[optimizer.lr=1e parallel.tp=1 and 1 more] optimizer.lr=1e: must be a finite number" in message
    assert "[optimizer.lr=0.1 parallel.tp=3] parallel.tp=3: does not split evenly" in message
    assert "[optimizer.lr=0.1 parallel.tp=1 and 1 more] run.seed=0" in message


def test_a_mistake_of_all_points_is_told_once() -> None:
    message = refusal("optimizer.lr=0.1,0.2", "run.sed=1")
    assert message.count("run.sed=1") == 1
    assert "- run.sed=1: there is no such key" in message


def test_points_share_one_sweep_folder() -> None:
    assert "run.dir=runs/a, runs/b: differs between the points" in refusal("run.name=a,b")


def test_names_of_points_are_unique_and_need_no_quoting() -> None:
    points = [sweep.Point(number, (), ("data.split=[98,1,1]", f"run.name='{'x' * 200}'")) for number in range(12)]
    names = [point.name for point in points]
    assert len(set(names)) == len(names)
    assert names[0].startswith("0_data.split_-98-1-1-__run.name_")
    assert all(re.fullmatch(r"[\w.-]{1,100}", name) for name in names)


def test_points_are_trained_one_after_another_each_in_its_folder(trained: Started) -> None:
    assert sweep.run([*ONE_RANK, "optimizer.lr=0.1,0.2"]) == 3
    assert [words[-2:] for words in trained.read()] == [
        ["optimizer.lr=0.1", "run.dir='runs/quickstart_sweep/0_optimizer.lr_0.1'"],
        ["optimizer.lr=0.2", "run.dir='runs/quickstart_sweep/1_optimizer.lr_0.2'"],
    ]


def test_the_first_failure_is_the_exit_code_and_the_rest_is_trained(
    trained: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.run([*ONE_RANK, "optimizer.lr=0.2,0.3,0.1"]) == 3
    assert len(trained.read()) == 3
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "optimizer.lr_" in line]
    assert [row[3] for row in rows] == ["3", "2", "0"]


def test_a_point_that_was_told_to_stop_ends_the_sweep(trained: Started, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.run([*ONE_RANK, "optimizer.lr=0.75,0.1"]) == 75
    assert len(trained.read()) == 1
    assert "1_optimizer.lr_0.1" in capsys.readouterr().out


def test_nothing_is_trained_where_one_point_is_refused(trained: Started) -> None:
    refusal("optimizer.lr=0.1,0")
    assert trained.read() == []


def test_a_dry_run_lists_the_points(trained: Started, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *ONE_RANK, "optimizer.lr=0.1,0.2", "-m", "--dry-run"]) == 0
    assert "1_optimizer.lr_0.2" in capsys.readouterr().out
    assert trained.read() == []


def test_a_rank_of_a_launcher_does_not_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in (torchrun | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    assert "start `shardwright train -m` on one machine, outside of torchrun and srun" in refusal(
        "optimizer.lr=0.1,0.2"
    )
