"""Files beside Inductor's cache: written whole or not at all, the latest used are kept."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from fxshard import _compat

MOST = 256
"""Files that are kept."""
SUFFIX = ".graphs"


def directory() -> Path:
    """Where what fxshard knows about Inductor's cache lies: with it, it goes."""
    return Path(_compat.compile_cache()) / "fxshard"


def read(name: str) -> bytes | None:
    """What was written under a name, if it is still there."""
    path = directory() / f"{name}{SUFFIX}"
    try:
        data = path.read_bytes()
    except OSError:
        return None
    with contextlib.suppress(OSError):  # somebody else's cache, which may be read
        os.utime(path)
    return data


def write(name: str, data: bytes) -> None:
    """Keep something under a name. Raises ``OSError`` where that cannot be."""
    folder = directory()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
    try:
        temporary.write_bytes(data)
        os.replace(temporary, folder / f"{name}{SUFFIX}")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _forget_the_oldest(folder)


def remove(name: str) -> None:
    """Forget something that turned out to be of no use."""
    (directory() / f"{name}{SUFFIX}").unlink(missing_ok=True)


def _forget_the_oldest(folder: Path) -> None:
    with contextlib.suppress(OSError):  # other processes clear up, too
        found = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in found[:-MOST]:
            path.unlink(missing_ok=True)
