"""Where a run stands is JSON, comes back equal, and belongs to one data set."""

import json
from pathlib import Path

import pytest

from shardwright.conf.problems import RefusedError
from shardwright.data.sampler import DataPosition
from shardwright.parallel.layout import Layout
from shardwright.pretrain import checkpoint_store
from shardwright.pretrain.trainer_state import TrainerState

STATE = TrainerState(step=3, position=DataPosition(24, ((8, 16),)), trained_tokens=999, loss=2.75, data="tokens 1")


def written(folder: Path) -> Path:
    (folder / checkpoint_store.TRAINER).write_text(json.dumps(STATE.to_json(Layout(world_size=4, tp=2), attempt=1)))
    return folder


def test_a_state_comes_back_equal_and_with_its_layout(tmp_path: Path) -> None:
    assert TrainerState.read(written(tmp_path)) == STATE
    assert TrainerState.read_layout(tmp_path) == Layout(world_size=4, tp=2)


def test_a_step_moves_every_counter() -> None:
    after = STATE.after_step(num_samples=8, num_tokens=100, loss=2.5)
    assert (after.step, after.position.consumed_samples, after.trained_tokens) == (4, 32, 1099)
    assert after.position.skipped == STATE.position.skipped


def test_a_position_in_other_data_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"data=tokens 2: .*other data \(tokens 1\)"):
        STATE.on_data("tokens 2")
    assert STATE.on_data("tokens 1") == STATE
    assert TrainerState().on_data("tokens 2").data == "tokens 2"
