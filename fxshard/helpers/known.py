"""Which segments Inductor's cache on disk has from earlier, and which programs have compiled theirs: nothing is left to
help with.

A file beside that cache says so, one for each segment and all that its compilation depends on, one for each program. It
may be out of date, and then the segment is compiled by whoever wants it.
"""

from __future__ import annotations

import hashlib
import os
import sys

from fxshard import _compat
from fxshard.remembered.store import is_marked, mark


class Known:
    """What was compiled in this cache, under this configuration."""

    def __init__(self) -> None:
        self._circumstances = repr(_compat.compile_circumstances())

    def __contains__(self, structure: str) -> bool:
        return is_marked(self._name(structure))

    def add(self, structure: str) -> None:
        """Remember that it is there."""
        mark(self._name(structure))

    def _name(self, structure: str) -> str:
        return hashlib.sha256(f"{structure} {self._circumstances}".encode()).hexdigest()


def has_run() -> bool:
    """Whether this program has compiled a model before, with this cache, as it is now."""
    program = _program()
    return program is not None and is_marked(program)


def note_run() -> None:
    """Remember that this program has compiled a model."""
    program = _program()
    if program is not None:
        mark(program)


def _program() -> str | None:
    """What stands for a script, unchanged, and its arguments; None where there is no script."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        status = os.stat(script) if script else None
        where = os.getcwd()
    except OSError:  # a script or a directory that has been deleted
        return None
    if status is None:
        return None
    said = ("program", sys.executable, script, status.st_mtime_ns, status.st_size, sys.argv[1:], where)
    return hashlib.sha256(repr(said).encode()).hexdigest()
