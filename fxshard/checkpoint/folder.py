"""A checkpoint as a folder: written aside, renamed when it is complete, found again, refused when it is damaged."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from pathlib import Path
from typing import Any

from fxshard._torch.errors import CheckpointError

MANIFEST = "fxshard.json"
METADATA = ".metadata"
PARTIAL, DELETING = ".partial", ".deleting"
LOCK = ".lock"
FORMAT = 1


class Partial:
    """A checkpoint that is being written, under a name that no other save has, and locked as long as its process lives.

    Made and given its final name by the first rank; the others only write into ``folder``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        self._lock: int | None = None
        self.folder.mkdir(parents=True)
        # Named when it is locked: a lock file that nobody holds belongs to a process that has ended.
        unnamed = self.folder / (LOCK + ".new")
        handle = os.open(unnamed, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without locks: others leave the folder alone, whatever becomes of it
            os.close(handle)
            unnamed.unlink()
        else:
            self._lock = handle
            unnamed.rename(self.folder / LOCK)

    def commit(self, record: dict[str, Any]) -> None:
        """Say what a complete checkpoint consists of, and give it its name. From here on it exists."""
        (self.folder / LOCK).unlink(missing_ok=True)
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
        (self.folder / LOCK).unlink(missing_ok=True)
        _sync(self.folder)
        try:
            self.folder.rename(self.path)
        except OSError as error:
            taken = f"{self.path} exists by now: another program saved there at the same time"
            raise OSError(taken if self.path.exists() else str(error)) from error
        self._unlock()
        _sync(self.path.parent)

    def abandon(self) -> None:
        """Remove what was written: a disk that was full has room again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def prepare(path: Path) -> Partial:
    """Make room for a checkpoint at ``path``; raises ``CheckpointError`` if that is not possible."""
    if path.exists():
        raise CheckpointError(f"{path} exists already: choose another name, or remove it")
    try:
        _remove_abandoned(path.parent)
        return Partial(path)
    except OSError as error:
        raise CheckpointError(f"cannot write to {path.parent}: {error}") from None


def _remove_abandoned(folder: Path) -> None:
    """Delete what saves left behind whose process has ended: nobody holds their lock any more."""
    for lock in folder.glob(f"*{PARTIAL}/{LOCK}"):
        try:
            handle = os.open(lock, os.O_RDWR)
        except OSError:  # gone meanwhile, or somebody else's
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # a save in progress
        else:
            shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(handle)


def read(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; raises ``CheckpointError`` if there is none or it cannot be read."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}")
    if path.name.endswith((PARTIAL, DELETING)):
        raise CheckpointError(f"{path} was not completed: the process that wrote or deleted it did not finish")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is no complete checkpoint of fxshard: it has no {MANIFEST}")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {MANIFEST} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has a format that this version does not read (it reads format {FORMAT})")
    return manifest


def check(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Whether all files of a checkpoint are there, as long as they were, with the metadata that was written.

    Costs one look at each file's size. Raises ``CheckpointError`` with what is wrong; returns the manifest.
    """
    path = Path(path)
    manifest = read(path)
    for name, size in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{path} is damaged: {name} has {file.stat().st_size} bytes instead of {size}")
    if hashlib.sha256((path / METADATA).read_bytes()).hexdigest() != manifest["metadata_sha256"]:
        raise CheckpointError(f"{path} is damaged: {METADATA} is not what was written")
    return manifest


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints, or None; damaged ones are left out with a warning.

    Newest is the one whose name ends with the largest number (``step-100``); of equals, the one written last.
    """
    for candidate in _newest_first(Path(path)):
        try:
            check(candidate)
        except CheckpointError as error:
            warnings.warn(f"left out: {error}", RuntimeWarning, stacklevel=2)
            continue
        return candidate
    return None


def find(path: Path) -> Path:
    """``path`` if it is a checkpoint, otherwise the latest one in it."""
    if path.is_dir() and not (path / MANIFEST).exists() and _newest_first(path):
        found = latest(path)
        if found is None:
            raise CheckpointError(f"all checkpoints in {path} are damaged")
        return found
    check(path)
    return path


def prune(path: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints in the folder of ``path``, which stays in any case."""
    for old in _newest_first(path.parent)[keep:]:
        if old != path:
            # Renamed first: a process that ends in between must not leave half a checkpoint that looks like one.
            leaving = old.rename(old.with_name(old.name + DELETING))
            shutil.rmtree(leaving)


def _newest_first(folder: Path) -> list[Path]:
    found = []
    for candidate in folder.iterdir() if folder.is_dir() else ():
        if (candidate / MANIFEST).is_file() and not candidate.name.endswith((PARTIAL, DELETING)):
            number = re.search(r"(\d+)$", candidate.name)
            found.append((int(number[1]) if number else -1, (candidate / MANIFEST).stat().st_mtime_ns, candidate))
    return [candidate for *_, candidate in sorted(found, reverse=True)]


def _sync(folder: Path) -> None:
    """A rename is only safe from a power failure once its folder is written."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
