"""Keeping scheduled graphs, and having them back."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from torch import fx

from fxshard import _compat
from fxshard.events import Phase
from fxshard.log import LOG
from fxshard.lowering import structure
from fxshard.remembered import graphs, store
from fxshard.remembered.canonical import Unnamed
from fxshard.scheduled import Scheduled

VARIABLE = "FXSHARD_REMEMBER"
DIGEST = hashlib.sha256().digest_size


def wanted() -> bool:
    """Whether anything is kept or recalled: not with ``FXSHARD_REMEMBER=0``."""
    return os.environ.get(VARIABLE, "1") != "0"


def remember(key: str, scheduled: Scheduled) -> None:
    """Keep scheduled graphs, and what was made of them; where that cannot be, the next start traces again."""
    made = dict(scheduled.recorded), dict(scheduled.generated)
    others = scheduled.memory, scheduled.outputs, scheduled.left_out, *made
    try:
        first = graphs.dumps({**_segments(scheduled), **_parts(scheduled)}, *others)
        data = pickle.dumps((first, list(scheduled.graphs), graphs.dumps(scheduled.graphs)))
        store.write(key, hashlib.sha256(data).digest() + data)
    except (Unnamed, OSError) as error:
        LOG.debug("these graphs will be traced again at the next start: %s", error)


def _segments(scheduled: Scheduled) -> dict[Any, fx.GraphModule]:
    """Each by its structure."""
    children = [child for split in scheduled.splits.values() for child in split.children()]
    return {("segment", structure(child)): child for child in children if isinstance(child, fx.GraphModule)}


def _parts(scheduled: Scheduled) -> dict[Any, fx.GraphModule]:
    """What a start begins with."""
    splits = {("split", phase): split for phase, split in scheduled.splits.items()}
    return splits | {("outline", phase): outline for phase, outline in scheduled.outlines.items()}


def recall(key: str) -> Scheduled | None:
    """What was kept under a key, if anything was and it can be read."""
    data = store.read(key)
    if data is None:
        return None
    try:
        if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
            raise ValueError("it is damaged")
        first, phases, whole = pickle.loads(data[DIGEST:])
        found, (memory, outputs, left_out, *made) = graphs.loads(first)
    except Exception as error:  # of any kind, as what a damaged file may say is
        LOG.debug("graphs of an earlier start cannot be read, and are traced again: %s", error)
        store.remove(key)
        return None
    splits, outlines = (
        {name: module for (kind, name), module in found.items() if kind == each} for each in ("split", "outline")
    )
    return Scheduled(_Unread(phases, whole), memory, outlines, outputs, left_out, splits, *made)


class _Unread(Mapping[Phase, fx.GraphModule]):
    """Graphs that are read when somebody looks at them: what runs are their segments."""

    def __init__(self, phases: list[Phase], data: bytes) -> None:
        self._phases = phases
        self._data = data

    @cached_property
    def _graphs(self) -> dict[Phase, fx.GraphModule]:
        with _compat.as_a_compiler():  # whatever modes somebody looks in
            found, _ = graphs.loads(self._data)
        self._data = b""
        return found

    def __getitem__(self, phase: Phase) -> fx.GraphModule:
        return self._graphs[phase]

    def __contains__(self, phase: object) -> bool:
        return phase in self._phases

    def __iter__(self) -> Iterator[Phase]:
        return iter(self._phases)

    def __len__(self) -> int:
        return len(self._phases)


def forget(key: str) -> None:
    """Drop what was kept under a key: it did not fit."""
    LOG.debug("graphs of an earlier start do not fit, and are traced again")
    store.remove(key)
