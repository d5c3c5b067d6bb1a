"""What a captured graph's schedule depends on beside the graph: torch, fxshard, the program, and how they are set."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from fxshard import _compat
from fxshard.remembered.canonical import Unnamed, canonical

OTHERS = ("transformer_engine", "triton")
"""Packages whose versions decide which kernels fxshard chooses."""


def surroundings() -> str:
    """All of it as a digest; raises :class:`~fxshard.remembered.canonical.Unnamed` where it cannot be told."""
    foreign = _compat.foreign_code()
    compiled, traced = _compat.compiled_under(), _compat.traced_under()
    if foreign is not None or compiled is None or traced is None:
        raise Unnamed(foreign or "lowerings or hooks of the program's own take part in compiling")
    versions = {name: (_version(name), getattr(sys.modules.get(name), "__version__", None)) for name in OTHERS}
    built = _compat.triton_files()
    switches = {name: value for name, value in os.environ.items() if name.startswith("NVTE_")}
    said = canonical([platform.python_version(), versions, built, _fxshard(), compiled, traced, switches, program()])
    return hashlib.sha256(said.encode() + _compat.hash_torch()).hexdigest()


def program() -> list[Any]:
    """The files of the running program and when each was last changed. Installed packages are none of it: what they do
    to tracing is looked for where it takes part. Nor is what compilers have written.
    """
    found: dict[str, tuple[int, int]] = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__dict__", {}).get("__file__")  # asking a lazy module would import it
        if isinstance(path, str) and not _is_installed(path) and not _compat.is_generated(path):
            try:
                status = os.stat(path)
            except OSError:
                continue  # it was there when it was imported
            found[path] = status.st_mtime_ns, status.st_size
    return sorted(found.items())


def _is_installed(path: str) -> bool:
    return path.startswith(_compat.own_directories()) or "site-packages" in path or "dist-packages" in path


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _fxshard() -> str:
    """A digest of fxshard's own files."""
    found = hashlib.sha256()
    for folder, folders, files in os.walk(Path(__file__).parents[1], followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                found.update(name.encode())
                found.update(Path(folder, name).read_bytes())
    return found.hexdigest()
