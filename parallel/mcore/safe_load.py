"""Loading a checkpoint runs nothing that the checkpoint says: every place that unpickles is restricted.

torch's distributed checkpoint unpickles its `.metadata` (filesystem.py, `FileSystemReader.read_metadata`) and every
byte entry (default_planner.py, `load_bytes`) without restriction, and megatron-core reads its common state through the
same path. `harden` replaces the first by an unpickler with a narrow allow-list and the second by `weights_only=True`.
Importing megatron-core lets `weights_only` load a list of further classes, what Megatron-LM's checkpoints hold of their
arguments; ours need none of these, so `harden` takes them back.
"""

import contextlib
import io
import pickle
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint._nested_dict import (  # type: ignore[attr-defined]
    set_element,
)
from torch.distributed.checkpoint.api import CheckpointException

from shardwright.conf.problems import Problem, RefusedError

_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "StorageMeta",
    },
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "collections": {"OrderedDict", "defaultdict"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch._C": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles what a legitimate `.metadata` holds; any other global is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's .metadata wants to import {module}.{name}: refused")


def _load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
    loaded = torch.load(value, weights_only=True)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
    else:
        self.state_dict[read_item.dest_index.fqn] = loaded


def read_metadata(folder: Path) -> Any:
    """torch's `.metadata` of a checkpoint, by the allow-list."""
    with (folder / ".metadata").open("rb") as file:
        return MetadataUnpickler(file).load()


@contextlib.contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Make one refusal of what a restricted load of `folder` raises inside, also where torch has wrapped it."""
    try:
        yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        inner = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        reasons = [str(reason) for reason, _ in inner if isinstance(reason, pickle.UnpicklingError)]
        if not reasons:
            raise
        remedy = "nothing of it was run; do not load checkpoints of somebody whom you do not trust"
        raise RefusedError(
            [Problem(key="checkpoint", value=folder, rule=_first_lines(reasons), remedy=remedy)]
        ) from None


def _first_lines(reasons: list[str]) -> str:
    """torch's message names the import in its second paragraph and advises to trust the file in the others."""
    named = [line.strip() for text in reasons for line in text.splitlines() if "GLOBAL" in line or "refused" in line]
    return "; ".join(dict.fromkeys(named)) or reasons[0].splitlines()[0]


def harden() -> None:
    """Restrict every load of this process; idempotent, called before the first one."""
    restricted = types.ModuleType("pickle_restricted")
    restricted.__dict__.update(pickle.__dict__)
    restricted.__dict__["load"] = lambda file, **_: MetadataUnpickler(file).load()
    filesystem.pickle = restricted  # type: ignore[attr-defined]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([io.BytesIO])
    default_planner.DefaultLoadPlanner.load_bytes = _load_bytes  # type: ignore[method-assign]
