"""No byte of a checkpoint can change unseen, and all ranks come to the same verdict without waiting for a dead one."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardwright.pretrain import checkpoint_integrity as integrity
from shardwright.pretrain import checkpoint_store as store

NUM_FLIPS = 25
"""Of every file; the seed is fixed."""


class Meeting:
    """A store as the ranks' own: `get` waits for `set`."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str, /) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=20), f"nobody set {key}"
            return self._values[key].encode()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of five files beside manifest and marker, one of them in a folder, one empty."""
    temporary = store.begin(tmp_path / "checkpoints", 10)
    (temporary / "weights").mkdir()
    contents = {"__0_0.distcp": 5000, "__1_0.distcp": 3000, ".metadata": 700, "weights/a": 100, "empty": 0}
    for name, size in contents.items():
        (temporary / name).write_bytes(random.Random(name).randbytes(size))
    return store.commit(temporary, {"step": 10}, {}).path


def verdicts(path: Path, world: int, patience_seconds: float = 0.0) -> list[integrity.Verdict]:
    meeting = Meeting()

    def one(rank: int) -> integrity.Verdict:
        return integrity.verify_together(path, meeting, rank, world, readers=2, patience_seconds=patience_seconds)

    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(one, range(world)))


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def append(path: Path) -> None:
    path.write_text(path.read_text() + " ")


def test_a_checkpoint_as_it_was_written_is_whole(checkpoint: Path) -> None:
    whole = integrity.verify(checkpoint)
    assert whole.reasons == ()
    assert whole.num_bytes == store.Committed(10, checkpoint).num_bytes


def test_a_flipped_bit_anywhere_in_any_file_is_found_and_the_file_is_named(checkpoint: Path) -> None:
    numbers = random.Random(1)
    for name in store.files(checkpoint):
        size = (checkpoint / name).stat().st_size
        for position in numbers.sample(range(size), min(size, NUM_FLIPS)):
            bit = numbers.randrange(8)
            flip(checkpoint / name, position, bit)
            (reason,) = integrity.verify(checkpoint).reasons
            assert name in reason, (name, position, bit)
            flip(checkpoint / name, position, bit)
    assert integrity.verify(checkpoint).reasons == ()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: (path / "__0_0.distcp").write_bytes(b"half"), "__0_0.distcp has 4 bytes, the manifest says 5000"),
        (lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
        (lambda path: (path / "common.pt").write_bytes(b"planted"), "common.pt is not in the manifest"),
        (lambda path: (path / store.MARKER).unlink(), "no marker COMMITTED"),
        (lambda path: (path / store.MARKER).write_text("step 10\n"), "manifest.json is not what COMMITTED vouches for"),
        (lambda path: (path / store.MANIFEST).write_text("{}"), "manifest.json cannot be read"),
        (lambda path: append(path / store.MANIFEST), "manifest.json is not what COMMITTED vouches for"),
        (lambda path: (path / store.MANIFEST).unlink(), "manifest.json cannot be read"),
    ],
)
def test_what_is_missing_short_or_foreign_is_found_without_reading_contents(
    checkpoint: Path, harm: Callable[[Path], object], reason: str
) -> None:
    harm(checkpoint)
    assert (store.damage(checkpoint) or "").startswith(reason)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_all_ranks_come_to_the_same_verdict_whoever_has_the_damaged_file(checkpoint: Path, world: int) -> None:
    for name in ("__0_0.distcp", "weights/a", store.TRAINER):
        flip(checkpoint / name, 3)
        found = verdicts(checkpoint, world)
        assert len(set(found)) == 1
        assert [reason.split()[0] for reason in found[0].reasons] == [name]
        flip(checkpoint / name, 3)
    assert {verdict.reasons for verdict in verdicts(checkpoint, world)} == {()}


def test_every_file_is_read_by_one_rank_and_the_bytes_are_spread(checkpoint: Path) -> None:
    sizes = {name: entry["bytes"] for name, entry in store.manifest(checkpoint).items()}
    shares = integrity.share(sizes, 2)
    assert sorted(name for names in shares for name in names) == sorted(sizes)
    loads = [sum(sizes[name] for name in names) for names in shares]
    assert max(loads) == 5000


def test_a_file_that_another_machine_sees_late_is_waited_for(checkpoint: Path) -> None:
    content = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").unlink()

    def appear() -> None:
        time.sleep(0.3)
        (checkpoint / ".metadata").write_bytes(content)

    thread = threading.Thread(target=appear)
    thread.start()
    found = verdicts(checkpoint, 2, patience_seconds=10)
    thread.join()
    assert [verdict.reasons for verdict in found] == [(), ()]
