"""Files beside Inductor's cache: written whole or not at all, the latest used are kept. Some are empty, and say no more
than that something was done.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from fxshard import _compat

MOST = 256
"""Files that are kept."""
MOST_MARKS = 4096
SUFFIX, MARK, UNFINISHED = ".graphs", ".done", ".unfinished"
HOUR = 3600.0


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
    temporary = folder / f"{name}.{os.getpid()}.{threading.get_ident()}{UNFINISHED}"
    try:
        temporary.write_bytes(data)
        os.replace(temporary, folder / f"{name}{SUFFIX}")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _forget_the_oldest(folder, SUFFIX, MOST)


def remove(name: str) -> None:
    """Forget something that turned out to be of no use."""
    with contextlib.suppress(OSError):  # somebody else's cache, which may be read
        (directory() / f"{name}{SUFFIX}").unlink(missing_ok=True)


def mark(name: str) -> None:
    """Note that what has this name was done, if anything can be noted."""
    folder = directory()
    with contextlib.suppress(OSError):  # somebody else's cache, which may be read
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}{MARK}").touch()
        _forget_the_oldest(folder, MARK, MOST_MARKS)


def is_marked(name: str) -> bool:
    """Whether it was noted, and not forgotten since."""
    return (directory() / f"{name}{MARK}").exists()


def _forget_the_oldest(folder: Path, suffix: str, most: int) -> None:
    with contextlib.suppress(OSError):  # other processes clear up, too
        found = list(folder.glob(f"*{suffix}"))
        if len(found) > most:
            for path in sorted(found, key=lambda path: path.stat().st_mtime)[:-most]:
                path.unlink(missing_ok=True)
        for path in folder.glob(f"*{UNFINISHED}"):  # of processes that were killed
            if time.time() - path.stat().st_mtime > HOUR:
                path.unlink(missing_ok=True)
