"""A complete checkpoint as a folder: found again, refused when it is damaged, deleted when it is old."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from fxshard._torch.errors import CheckpointError

MANIFEST = "fxshard.json"
METADATA = ".metadata"
PARTIAL, DELETING = ".partial", ".deleting"
FORMAT = 1


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
            old.rename(old.with_name(old.name + DELETING))
    for leaving in path.parent.glob(f"*{DELETING}"):  # those of a process that was killed here, too
        shutil.rmtree(leaving, ignore_errors=True)


def _newest_first(folder: Path) -> list[Path]:
    found = []
    for candidate in folder.iterdir() if folder.is_dir() else ():
        if (candidate / MANIFEST).is_file() and not candidate.name.endswith((PARTIAL, DELETING)):
            number = re.search(r"(\d+)$", candidate.name)
            found.append((int(number[1]) if number else -1, (candidate / MANIFEST).stat().st_mtime_ns, candidate))
    return [candidate for *_, candidate in sorted(found, reverse=True)]


def sync(folder: Path) -> None:
    """A rename is only safe from a power failure once its folder is written."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
