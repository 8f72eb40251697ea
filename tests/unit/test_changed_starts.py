"""A run that goes on with other settings: what counts from then on, what is told, what is refused (no ranks here)."""

import re
from pathlib import Path

import pytest

from shardwright.conf import compose
from shardwright.conf.problems import RefusedError
from shardwright.data.batch_size import BatchSizes
from shardwright.data.sampler import DataPosition
from shardwright.parallel.layout import Layout
from shardwright.pretrain import checkpoint_store
from shardwright.pretrain.folder import RunFolder
from shardwright.pretrain.schedule import Update, next_update
from shardwright.pretrain.start import Start, begin, resolve
from shardwright.pretrain.train import train
from shardwright.pretrain.trainer_state import TrainerState

MOCK = ("data=mock", "cluster.gpu=none")
TEN_AT_6E4 = (*MOCK, "schedule=constant", "optimizer.lr=6e-4", "schedule.lr_warmup_iters=0", "schedule.train_iters=10")
COSINE = ("schedule=cosine", "optimizer.lr=3e-5", "optimizer.min_lr=2e-5", "schedule.train_iters=20")
RAMP = (
    *(*MOCK, "cluster.ranks=2", "data.rampup_batch_size=[2,2,24]", "data.global_batch_size=8"),
    *("data.micro_batch_size=1", "schedule.train_iters=20"),
)


def ran(path: Path, overrides: tuple[str, ...], step: int, consumed_samples: int) -> Path:
    """A run that was started once and saved at `step`."""
    start, folder = resolve([*overrides, f"run.dir={path}"], None), RunFolder(path)
    folder.create()
    with folder.lock():
        begin(start, [*overrides, f"run.dir={path}"], {})
    state = TrainerState(step=step, position=DataPosition(consumed_samples), data="mock")
    told = state.to_json(Layout(world_size=start.config.world_size), 1)
    temporary = checkpoint_store.begin(folder.checkpoints, step)
    checkpoint_store.commit(temporary, told, {}, config=compose.dump(start.config))
    return path


def go_on(path: Path, *overrides: str) -> tuple[Start, list[Update]]:
    """What a start would do, and the updates that it would make."""
    start = resolve([f"run.dir={path}", *overrides], None)
    assert start.load is not None
    state, met = TrainerState.read(start.load.path), []
    while state.step < start.config.schedule.train_iters:
        met.append(next_update(state.step, state.position.consumed_samples, start.config))
        state = state.after_step(met[-1].batch_size, 1, loss=1.0)
    return start, met


# ---- learning rate ---------------------------------------------------------------------------------------------------


def test_another_schedule_counts_whole_from_the_first_update_on(tmp_path: Path) -> None:
    start, updates = go_on(ran(tmp_path / "run", TEN_AT_6E4, 10, 80), *COSINE)
    assert updates[0].number == 11
    assert all(2e-5 <= update.learning_rate <= 3e-5 for update in updates)
    told = {each.key: (each.saved, each.present) for each in start.differences}
    assert told["optimizer.lr"] == (6e-4, 3e-5) and "schedule.lr_decay_style" in told


def test_without_being_told_otherwise_a_run_keeps_its_schedule(tmp_path: Path) -> None:
    start, updates = go_on(ran(tmp_path / "run", TEN_AT_6E4, 10, 80), "schedule.train_iters=20")
    assert {update.learning_rate for update in updates} == {6e-4}
    assert [each.key for each in start.differences] == ["schedule.train_iters"]


def test_another_run_that_starts_from_a_checkpoint_is_told_every_key_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = ran(tmp_path / "old", TEN_AT_6E4, 10, 80)
    typed = [*MOCK, *COSINE, f"checkpoint.load={old}", f"run.dir={tmp_path / 'new'}"]
    assert train(typed, dry_run=True) == 0
    printed = capsys.readouterr().out
    assert "changed since" in printed
    for key, change in {"optimizer.lr": "0.0006 -> 3e-05 (results change)", "schedule.train_iters": "10 -> 20"}.items():
        assert re.search(rf"{re.escape(key)} +{re.escape(change)}", printed), key


def test_an_attempt_that_takes_a_change_back_is_told_against_the_checkpoint_too(tmp_path: Path) -> None:
    path = ran(tmp_path / "run", TEN_AT_6E4, 10, 80)
    changed = resolve([f"run.dir={path}", "optimizer.lr=1e-4"], None).config
    temporary = checkpoint_store.begin(RunFolder(path).checkpoints, 12)
    told = TrainerState(step=12, position=DataPosition(96), data="mock").to_json(Layout(world_size=1), 2)
    checkpoint_store.commit(temporary, told, {}, config=compose.dump(changed))
    start = resolve([f"run.dir={path}"], None)
    assert start.differences == []
    assert [str(each) for each in start.since_checkpoint] == ["optimizer.lr: 0.0001 -> 0.0006"]


def test_twelve_steps_and_a_resume_have_the_learning_rates_of_twenty_in_one_go(tmp_path: Path) -> None:
    overrides = (
        *(*MOCK, "schedule=cosine", "schedule.train_iters=20", "schedule.lr_warmup_iters=5"),
        *("optimizer.lr=1e-3", "optimizer.min_lr=1e-4"),
    )
    config = compose.compose([*overrides])
    straight = [next_update(step, 8 * step, config).learning_rate for step in range(20)]
    path = ran(tmp_path / "run", overrides, 12, 12 * config.data.global_batch_size)
    _, resumed = go_on(path)
    assert [update.learning_rate for update in resumed] == straight[12:]
    assert resumed[0].number == 13 and resumed[0].learning_rate == pytest.approx(5.02962e-4, rel=1e-6)


# ---- batch size ------------------------------------------------------------------------------------------------------


def test_a_run_stopped_in_its_ramp_goes_on_with_it_in_every_layout_that_can_take_all_of_it(tmp_path: Path) -> None:
    path = ran(tmp_path / "run", RAMP, 7, 22)
    _, updates = go_on(path)
    assert [update.batch_size for update in updates[:3]] == [6, 8, 8]
    with pytest.raises(RefusedError, match=r"data\.rampup_batch_size=\[2,2,24\]: passes through 2, 6: each"):
        resolve([f"run.dir={path}", "cluster.ranks=4"], None)


def test_another_batch_size_takes_the_next_samples_and_none_twice(tmp_path: Path) -> None:
    path = ran(tmp_path / "run", RAMP, 7, 22)
    start, updates = go_on(path, "data.global_batch_size=16", "data.rampup_batch_size=null")
    assert {each.key for each in start.differences} == {"data.global_batch_size", "data.rampup_batch_size"}
    assert {update.batch_size for update in updates} == {16}
    assert start.load is not None
    position = TrainerState.read(start.load.path).position
    assert position.stream_index() == 22 == sum(BatchSizes.of(compose.compose([*RAMP]).data).steps(0, 7))


# ---- layout ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_buckets_goes_on_in_its_layout_alone(tmp_path: Path) -> None:
    path = ran(tmp_path / "run", (*MOCK, "cluster.ranks=2", "checkpoint.optimizer_format=dp_reshardable"), 7, 56)
    go_on(path, "checkpoint.optimizer_format=fully_reshardable")
    with pytest.raises(RefusedError) as caught:
        resolve([f"run.dir={path}", "parallel.tp=2", "cluster.ranks=4"], None)
    assert [problem.key for problem in caught.value.problems] == ["parallel.tp", "cluster.ranks"]
    assert "save with checkpoint.optimizer_format=fully_reshardable" in str(caught.value)


# ---- from another run ------------------------------------------------------------------------------------------------


def test_what_a_run_may_not_change_a_run_that_starts_from_its_checkpoint_may_not_either(tmp_path: Path) -> None:
    old = ran(tmp_path / "old", TEN_AT_6E4, 10, 80)
    other = ["run.seed=77", "data.seq_length=128", "model.layernorm_epsilon=0.001"]
    with pytest.raises(RefusedError) as caught:
        resolve([*TEN_AT_6E4, *other, f"checkpoint.load={old}", f"run.dir={tmp_path / 'new'}"], None)
    for override in other:
        assert re.search(rf"{re.escape(override)}: the checkpoint .*step_00000010 was written with", str(caught.value))


def test_weights_that_nothing_was_trained_for_fix_the_model_alone(tmp_path: Path) -> None:
    old = ran(tmp_path / "old", TEN_AT_6E4, 0, 0)
    resolve([*TEN_AT_6E4, "run.seed=77", f"checkpoint.load={old}", f"run.dir={tmp_path / 'new'}"], None)
    with pytest.raises(RefusedError, match=r"model\.num_layers=3: the checkpoint"):
        resolve([*TEN_AT_6E4, "model.num_layers=3", f"checkpoint.load={old}", f"run.dir={tmp_path / 'new'}"], None)
