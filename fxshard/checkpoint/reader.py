"""Reads rows of stored tensors straight into their place.

torch's reader loads every stored piece that a rank needs a row of as a whole, and copies rows out of it. In the files
that fxshard writes, a piece is an uncompressed record in row order, so the rows that are needed can be read alone, into
the memory where they belong.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from fxshard._torch.errors import CheckpointError
from fxshard.checkpoint.metadata import Place, read_metadata


class RowReader(FileSystemReader):
    """``FileSystemReader`` for checkpoints that ``fxshard.save`` wrote."""

    def __init__(self, path: Path, files: Mapping[str, int]) -> None:
        super().__init__(path)
        self._metadata = read_metadata(path, files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata  # torch's own would unpickle the file

    def damage(self, begins: tuple[str, ...], rank: int, ranks: int) -> list[str]:
        """Damage in this rank's share of the pieces whose keys begin so.

        Ranks verify equally many bytes each, whichever of them will read them: a rank reads rows, and a checksum is
        that of a whole piece.
        """
        pieces = [(place, index.fqn) for index, place in self._places().items() if index.fqn.startswith(begins)]
        pieces.sort(key=lambda piece: (piece[0].relative_path, piece[0].offset))
        total = sum(place.length for place, _ in pieces)
        found: list[str] = []
        before = 0
        for place, key in pieces:
            if total * rank <= before * ranks < total * (rank + 1):
                try:
                    self._verify(place, key)
                except (CheckpointError, OSError) as error:
                    found.append(str(error))
            before += place.length
        return found

    def _places(self) -> dict[MetadataIndex, Place]:
        return self._metadata.storage_data

    def _verify(self, place: Place, key: str) -> None:
        is_tensor = isinstance(self._metadata.state_dict_metadata.get(key), TensorStorageMetadata)
        with open(os.path.join(self.path, place.relative_path), "rb", buffering=0) as file:
            if is_tensor:
                Record(file, place.offset, place.length, key).verify()
            else:
                verify_archive(file, place.offset, place.length, key)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            with open(os.path.join(self.path, name), "rb", buffering=0) as file:
                for item in items:
                    self._read(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: io.FileIO, item: ReadItem, planner: LoadPlanner) -> None:
        place = self.storage_data[item.storage_index]
        if item.type == LoadItemType.BYTE_IO:
            packed = bytearray(place.length)
            fill(file, memoryview(packed), place.offset)
            planner.load_bytes(item, io.BytesIO(packed))
            return
        stored = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata) and item.storage_index.index is not None
        sizes = stored.chunks[item.storage_index.index].sizes
        dtype = stored.properties.dtype
        target = planner.resolve_tensor(item).detach()
        record = Record(file, place.offset, place.length, item.storage_index.fqn)
        if record.size != math.prod(sizes) * dtype.itemsize:
            raise CheckpointError(
                f"{file.name}: {item.storage_index.fqn} has {record.size} bytes, not those of {sizes}"
            )
        rows = (item.storage_offsets[0], item.lengths[0]) if len(sizes) else (0, 1)
        whole_rows = tuple(item.lengths[1:]) == tuple(sizes[1:])
        row_bytes = math.prod(sizes[1:]) * dtype.itemsize
        in_place = whole_rows and target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
        into = target if in_place else torch.empty((rows[1], *sizes[1:]) if len(sizes) else (), dtype=dtype)
        record.read(into, rows[0] * row_bytes)
        if not in_place:
            for dim in range(1, len(sizes)):
                into = into.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
            target.copy_(into)
        planner.commit_tensor(item, target)


CHUNK = 2**22
"""Bytes that are read at a time where only their checksum is wanted."""


class Record:
    """Where in a file the elements of one stored piece lie."""

    def __init__(self, file: io.FileIO, offset: int, length: int, key: str) -> None:
        self._file, self._key = file, key
        try:
            archive = zipfile.ZipFile(_Window(file, offset, length))
            (self._info,) = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
            header = bytearray(30)
            fill(file, memoryview(header), offset + self._info.header_offset)
            name_length, extra_length = struct.unpack("<HH", header[26:30])
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise CheckpointError(f"{file.name} is damaged at {key}: {error}") from None
        self.size = self._info.file_size
        self._start = offset + self._info.header_offset + 30 + name_length + extra_length
        if self._info.compress_type != zipfile.ZIP_STORED or self._start + self.size > offset + length:
            raise CheckpointError(f"{file.name} is damaged: {key} does not lie where it should")

    def verify(self) -> None:
        """Raise ``CheckpointError`` if the elements are not those that were written."""
        at, left, crc = self._start, self.size, 0
        buffer = memoryview(bytearray(min(CHUNK, left)))
        while left:
            view = buffer[: min(CHUNK, left)]
            fill(self._file, view, at)
            crc = zlib.crc32(view, crc)
            at, left = at + len(view), left - len(view)
        if crc != self._info.CRC:
            raise CheckpointError(f"{self._file.name} is damaged: {self._key} is not what was written")

    def read(self, into: torch.Tensor, start: int) -> None:
        """Fill a contiguous tensor with bytes from ``start`` on."""
        if into.nbytes:
            view = memoryview((ctypes.c_char * into.nbytes).from_address(into.data_ptr())).cast("B")
            fill(self._file, view, self._start + start)


def verify_archive(file: io.FileIO, offset: int, length: int, key: str) -> None:
    """Raise ``CheckpointError`` if an object, of which all records are read, is not what was written."""
    try:
        broken = zipfile.ZipFile(_Window(file, offset, length)).testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, zlib.error) as error:
        raise CheckpointError(f"{file.name} is damaged at {key}: {error}") from None
    if broken is not None:
        raise CheckpointError(f"{file.name} is damaged: {key} is not what was written")


class _Window(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        got = os.preadv(self._file.fileno(), [view], self._offset + self._at)
        self._at += got
        return got


def fill(file: io.FileIO, view: memoryview, offset: int) -> None:
    """Read until ``view`` is full."""
    while view:
        got = os.preadv(file.fileno(), [view], offset)
        if not got:
            raise CheckpointError(f"{file.name} is damaged: it ends {len(view)} bytes too early")
        view, offset = view[got:], offset + got
