"""DCP's ``.metadata`` read as data. It is a pickle, and a pickle is a program: loading a folder must not run it.

No class that the file names is looked up. Each becomes an empty record that holds what the file says of it, and the
metadata is built anew from those records, with every type and range checked.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)

from fxshard._torch.errors import CheckpointError
from fxshard.checkpoint.folder import METADATA

NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
"""The classes in DCP's metadata (torch 2.11, 2.13), and in Megatron's; dtypes are found by their name."""


@dataclass(frozen=True)
class Place:
    """Where a stored piece lies: what torch's file system reader calls storage info."""

    relative_path: str
    offset: int
    length: int


class _Record:
    """A pickle's description of an object: its class, the arguments and the state that it is given."""

    name: str
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __init__(self, *args: Any) -> None:
        pass  # ``__new__`` has them; a pickle may make an object either way

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._made: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in NAMES.get(module, ()):
            # A class of its own for each file: whatever the file does to it ends with it.
            return self._made.setdefault(name, type(name, (_Record,), {"name": name}))
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Foreign(f"it names {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _Foreign("it refers to something outside of it")


class _Foreign(ValueError):
    """The file is not what DCP writes."""


def read_metadata(path: Path, files: Mapping[str, int]) -> Metadata:
    """The metadata of a checkpoint that consists of ``files`` (name → length); runs no code of the file's."""
    try:
        found = _Unpickler((path / METADATA).read_bytes()).load()
        return _metadata(found, files)
    except _Foreign as error:
        raise CheckpointError(f"{path / METADATA} was not written by torch.distributed.checkpoint: {error}") from None
    except Exception as error:  # a pickle that is damaged can fail in any way
        raise CheckpointError(f"{path / METADATA} cannot be read: {type(error).__name__}: {error}") from None


def _metadata(found: Any, files: Mapping[str, int]) -> Metadata:
    megatron = isinstance(found, _Record) and found.name == "MCoreMetadata"
    fields = _fields(found, "MCoreMetadata" if megatron else "Metadata")
    stored = {_a(key, str): _stored(value) for key, value in _a(fields["state_dict_metadata"], dict).items()}
    places = {_index(key): _place(value, files) for key, value in _a(fields["storage_data"], dict).items()}
    return Metadata(state_dict_metadata=stored, storage_data=places)


def _stored(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, _Record) and value.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    properties = _a(_of(fields["properties"], "TensorProperties").state, tuple)
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _a(fields["chunks"], list)]
    return TensorStorageMetadata(
        TensorProperties(dtype=_a(properties[0], torch.dtype)),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")  # torch leaves out what is None
    return MetadataIndex(
        _a(fields["fqn"], str), None if offset is None else _size(offset), None if index is None else _count(index)
    )


def _place(value: Any, files: Mapping[str, int]) -> Place:
    fields = _fields(value, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise _Foreign("its files are compressed or encrypted")
    place = Place(_a(fields["relative_path"], str), _count(fields["offset"]), _count(fields["length"]))
    if place.relative_path not in files:
        raise _Foreign(f"it refers to {place.relative_path!r}, which is no file of the checkpoint")
    if place.offset + place.length > files[place.relative_path]:
        raise _Foreign(f"it refers to bytes past the end of {place.relative_path!r}")
    return place


def _of(value: Any, name: str) -> _Record:
    if not isinstance(value, _Record) or value.name != name:
        raise _Foreign(f"there is a {type(value).__name__} where a {name} belongs")
    return value


def _fields(value: Any, name: str) -> dict[str, Any]:
    return _a(_of(value, name).state, dict)


def _size(value: Any) -> torch.Size:
    (numbers,) = _of(value, "Size").args or ((),)
    return torch.Size([_count(number) for number in _a(numbers, tuple)])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise _Foreign(f"{value!r:.60} is no number of bytes or elements")
    return value


def _a(value: Any, wanted: type) -> Any:
    if type(value) is not wanted:
        raise _Foreign(f"there is a {type(value).__name__} where a {wanted.__name__} belongs")
    return value
