"""Stored pieces in the files of a checkpoint: what ``torch.save`` writes is a zip archive, whose record of elements is
stored, not compressed, with a checksum."""

from __future__ import annotations

import ctypes
import io
import os
import struct
import zipfile
import zlib
from typing import Any

import torch

from fxshard._torch.errors import CheckpointError

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
    """The same for an object, of which all records of the archive are read."""
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
