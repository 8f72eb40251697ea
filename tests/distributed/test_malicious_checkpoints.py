"""A checkpoint that wants to run something is refused by name, wherever the payload lies, and nothing of it runs."""

import argparse
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from shardwright.conf.problems import RefusedError
from shardwright.parallel.mcore import shards

from . import engines
from .harness import RunRanks


class Payload:
    """Unpickling it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.called


def saved(rank: int, world: int, store: str, folder: Path) -> None:
    engines.save(engines.engine_of(engines.config_of([], world), rank, store), folder)


def refusal(rank: int, world: int, store: str, folder: Path) -> str:
    engine = engines.engine_of(engines.config_of([], world), rank, store)
    with pytest.raises(RefusedError) as caught:
        shards.load(engine, folder, with_rng=True)
    return str(caught.value)


def plant_metadata(folder: Path, payload: Payload) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = payload
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_entry(folder: Path, name: str, payload: object) -> None:
    """Let a byte entry of the shards hold the payload instead."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = [index for index in metadata.storage_data if index.fqn.startswith(name)]
    content = io.BytesIO()
    torch.save([payload], content)
    shard = folder / metadata.storage_data[index].relative_path
    metadata.storage_data[index] = _StorageInfo(shard.name, shard.stat().st_size, len(content.getvalue()))
    with shard.open("ab") as file:
        file.write(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_file(folder: Path, payload: Payload) -> None:
    """megatron-core would read this file of older checkpoints in place of the entry `common_state`."""
    torch.save({"args": payload}, folder / "common.pt")


@pytest.mark.parametrize("where", [".metadata", "common_state", "rng", "common.pt"])
@pytest.mark.parametrize("what", ["posix.system", "builtins.exec"])
def test_a_payload_is_refused_by_name_and_does_not_run(
    run_ranks: RunRanks, tmp_path: Path, where: str, what: str
) -> None:
    trace, folder = tmp_path / "it_ran", tmp_path / "saved"
    run_ranks(saved, 1, folder)
    payload = {
        "posix.system": Payload(os.system, f"touch {trace}"),
        "builtins.exec": Payload(exec, f"open({str(trace)!r}, 'w')"),
    }[what]
    if where == ".metadata":
        plant_metadata(folder, payload)
    elif where == "common.pt":
        plant_file(folder, payload)
    else:
        plant_entry(folder, where, payload)
    (message,) = run_ranks(refusal, 1, folder)
    assert str(folder) in message and what.partition(".")[2] in message
    assert not trace.exists()


def test_what_megatron_lm_would_load_and_ours_do_not_need_is_refused_too(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(saved, 1, tmp_path / "saved")
    plant_entry(tmp_path / "saved", "common_state", argparse.Namespace(lr=1.0))
    assert "argparse.Namespace" in run_ranks(refusal, 1, tmp_path / "saved")[0]
