"""A checkpoint that is being written: aside, under a name of its own, renamed when it is complete.

A lock file is next to it, held by the process that writes as long as that lives. It is there before the folder and
goes after it, so a folder whose lock is free belongs to a save that ended half-way.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from fxshard._torch.errors import CheckpointError
from fxshard.checkpoint.folder import FORMAT, MANIFEST, METADATA, PARTIAL, sync

LOCK = ".lock"


class Partial:
    """Made, and given its final name, by the first rank; the others only write into ``folder``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, self.lockable = None, True
        while handle is None and self.lockable:
            self.folder = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
            handle, self.lockable = _locked_anew(_lock_of(self.folder))
        self._lock = handle
        self.folder.mkdir()

    def commit(self, record: dict[str, Any]) -> None:
        """Say what a complete checkpoint consists of, and give it its name. From here on it exists."""
        files = {file.name: file.stat().st_size for file in sorted(self.folder.iterdir()) if file.is_file()}
        digest = hashlib.sha256((self.folder / METADATA).read_bytes()).hexdigest()
        manifest = {"format": FORMAT, **record, "files": files, "metadata_sha256": digest}
        with (self.folder / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        self.publish()

    def publish(self) -> None:
        """Give a folder that is complete its name."""
        sync(self.folder)
        try:
            self.folder.rename(self.path)
        except OSError as error:
            taken = f"{self.path} exists by now: another program saved there at the same time"
            raise OSError(taken if self.path.exists() else str(error)) from error
        self._unlock()
        sync(self.path.parent)

    def abandon(self) -> None:
        """Remove what was written: a disk that was full has room again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            _lock_of(self.folder).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def prepare(path: Path) -> Partial:
    """Make room for a checkpoint at ``path``; raises ``CheckpointError`` if that is not possible."""
    if path.exists():
        raise CheckpointError(f"{path} exists already: choose another name, or remove it")
    try:
        made = Partial(path)
    except OSError as error:
        raise CheckpointError(f"cannot write to {path.parent}: {error}") from None
    if made.lockable:  # otherwise it is not known what is abandoned
        _remove_abandoned(path.parent)
    return made


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _locked_anew(path: Path) -> tuple[int | None, bool]:
    """(A handle that holds the lock of a new file or None, whether the file system has locks)."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    if _take(handle) and _is_there(path, handle):  # not removed by another program before it was locked
        return handle, True
    lockable = _take(handle) is not None
    os.close(handle)
    if not lockable:
        path.unlink(missing_ok=True)
    return None, lockable


def _take(handle: int) -> bool | None:
    """Whether the lock is ours now; None where the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_there(path: Path, handle: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False


def _remove_abandoned(parent: Path) -> None:
    """Delete folders of saves whose process has ended, which has freed their lock."""
    folders = {folder for folder in parent.glob(f"*{PARTIAL}") if folder.is_dir()}
    folders |= {lock.with_name(lock.name.removesuffix(LOCK)) for lock in parent.glob(f"*{PARTIAL}{LOCK}")}
    for folder in folders:
        try:
            handle = os.open(_lock_of(folder), os.O_RDWR)
        except FileNotFoundError:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        except OSError:  # another user's
            continue
        if _take(handle):
            shutil.rmtree(folder, ignore_errors=True)
            _lock_of(folder).unlink(missing_ok=True)
        os.close(handle)
