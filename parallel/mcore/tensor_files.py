"""Single tensors out of and into the files of a checkpoint, without process groups and without a model.

A checkpoint of equal layers stacks them: `decoder.layers.mlp.linear_fc1.weight` is [layer, rows, columns], written in
chunks (a layer, a part of a tensor-parallel split). Here a tensor goes by its own name, with the layer's number in it,
and only its chunks are read, so that a model larger than memory can pass through. Nothing is unpickled but by
allow-list.
"""

import hashlib
import io
import json
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from megatron.core.dist_checkpointing import ShardedObject
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwright.parallel.mcore import safe_load

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")


class TensorReader:
    """Reads tensors of a checkpoint by their names.

    Args:
        folder: a checkpoint whose content has been verified.
    """

    def __init__(self, folder: Path) -> None:
        safe_load.harden()
        self._folder = folder
        self._metadata = safe_load.read_metadata(folder)

    def entries(self) -> Mapping[str, TensorStorageMetadata | BytesStorageMetadata]:
        """What the checkpoint holds, by the names of its files: layers may be stacked under one."""
        entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata] = self._metadata.state_dict_metadata
        return entries

    def read_bytes(self, key: str) -> bytes:
        """An entry that is no tensor, as it was pickled."""
        return self._content(MetadataIndex(key))

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor `name`, in the number format in which it was saved.

        Raises:
            KeyError: there is none.
        """
        key, layer = self._place(name)
        stored = self._metadata.state_dict_metadata[key]
        skip = 0 if layer is None else 1
        tensor = torch.empty(stored.size[skip:], dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            if layer is not None and not chunk.offsets[0] <= layer < chunk.offsets[0] + chunk.sizes[0]:
                continue
            data = self._chunk(key, chunk)
            if layer is not None:
                data = data[layer - chunk.offsets[0]]
            offsets, sizes = chunk.offsets[skip:], chunk.sizes[skip:]
            where = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            tensor[where] = data
        return tensor

    def _place(self, name: str) -> tuple[str, int | None]:
        """Key in the checkpoint, and the number of the layer where layers are stacked under it."""
        found = _LAYER.fullmatch(name)
        if found is None or name in self._metadata.state_dict_metadata:
            return name, None
        return found[1] + found[3], int(found[2])

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        content = self._content(MetadataIndex(key, chunk.offsets))
        data: torch.Tensor = torch.load(io.BytesIO(content), weights_only=True)
        return data

    def _content(self, index: MetadataIndex) -> bytes:
        stored = self._metadata.storage_data[index]
        with (self._folder / stored.relative_path).open("rb") as file:
            file.seek(stored.offset)
            content: bytes = file.read(stored.length)
        return content


def copy_pieces(source: Path, target: Path, num_files: int) -> dict[str, tuple[int, str]]:
    """Copy every piece of a checkpoint as it is, into so many files of about equal size, in the order of their names.

    Args:
        source: a checkpoint whose content has been verified.
        target: exists and is empty; gets the files and `.metadata`, synced.
        num_files: fewer where there are fewer pieces.

    Returns:
        Bytes and SHA-256 of the files.
    """
    metadata = safe_load.read_metadata(source)
    pieces = sorted(metadata.storage_data.items(), key=lambda item: (item[0].fqn, item[0].offset or ()))
    share, places = sum(stored.length for _, stored in pieces) / num_files, {}
    written: dict[str, tuple[int, str]] = {}
    done, rest = 0, list(reversed(pieces))
    while rest:
        name, digest = f"__{len(written)}_0.distcp", hashlib.sha256()
        with (target / name).open("wb") as file:
            while rest and (file.tell() == 0 or done + rest[-1][1].length / 2 < share * (len(written) + 1)):
                index, stored = rest.pop()
                with (source / stored.relative_path).open("rb") as origin:
                    origin.seek(stored.offset)
                    content = origin.read(stored.length)
                places[index] = replace(stored, relative_path=name, offset=file.tell())
                digest.update(content)
                file.write(content)
                done += stored.length
            file.flush()
            os.fsync(file.fileno())
            written[name] = (file.tell(), digest.hexdigest())
    (target / ".metadata").write_bytes(pickle.dumps(replace(metadata, storage_data=places)))
    return written


class TensorWriter:
    """Writes tensors, one after another, as a checkpoint that megatron-core loads; complete when it is left.

    Args:
        folder: exists and is empty.
        stacked_layers: how many layers are stacked; None where each has its own tensors.
        common: what the checkpoint holds beside tensors.
    """

    def __init__(self, folder: Path, stacked_layers: int | None, common: Mapping[str, Any]) -> None:
        self._folder, self._stacked_layers, self._common = folder, stacked_layers, dict(common)
        self._name = "__0_0.distcp"
        self._tensors: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> Self:
        self._file: BinaryIO = (self._folder / self._name).open("wb")
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the whole tensor `name`; stacked layers must have the same shape."""
        found = _LAYER.fullmatch(name)
        key, offset, size = name, torch.Size([0] * tensor.dim()), tensor.shape
        if found is not None and self._stacked_layers is not None:
            key, tensor = found[1] + found[3], tensor.unsqueeze(0)
            offset = torch.Size([int(found[2]), *offset])
            size = torch.Size([self._stacked_layers, *size])
        stored = self._tensors.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(size), [])
        )
        assert stored.size == size and stored.properties.dtype == tensor.dtype, f"{name} differs from its other layers"
        self._append(MetadataIndex(key, offset, len(stored.chunks)), tensor.contiguous())
        stored.chunks.append(ChunkStorageMetadata(offset, tensor.shape))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._file:
            if error is not None:
                return
            key = ShardedObject("common_state", None, (1,), (0,)).unique_key
            self._append(MetadataIndex(key), [self._common])
            self._tensors[key] = BytesStorageMetadata()
            self._file.flush()
            os.fsync(self._file.fileno())
        metadata = Metadata(state_dict_metadata=self._tensors, storage_data=self._places)
        (self._folder / ".metadata").write_bytes(pickle.dumps(metadata))
        (self._folder / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )

    def _append(self, index: MetadataIndex, data: Any) -> None:
        start = self._file.tell()
        torch.save(data, self._file)
        self._places[index] = _StorageInfo(self._name, start, self._file.tell() - start)
