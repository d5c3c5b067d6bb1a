"""Which segments Inductor's cache on disk has from earlier: there is nothing to help with.

A file beside that cache says so, one for each segment and all that its compilation depends on. It may be out of date,
and then the segment is compiled by whoever wants it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fxshard import _compat


class Known:
    """What was compiled in this cache, under this configuration."""

    def __init__(self) -> None:
        self._directory = Path(_compat.compile_cache()) / "fxshard"
        self._circumstances = repr(_compat.compile_circumstances())

    def __contains__(self, structure: str) -> bool:
        return self._file(structure).exists()

    def add(self, structure: str) -> None:
        """Remember that it is there."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._file(structure).touch()

    def _file(self, structure: str) -> Path:
        return self._directory / hashlib.sha256(f"{structure} {self._circumstances}".encode()).hexdigest()
