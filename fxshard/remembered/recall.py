"""Keeping scheduled graphs, and having them back."""

from __future__ import annotations

import os

from fxshard.log import LOG
from fxshard.remembered import graphs, store
from fxshard.remembered.canonical import Unnamed
from fxshard.scheduled import Scheduled

VARIABLE = "FXSHARD_REMEMBER"


def wanted() -> bool:
    """Whether anything is kept or recalled: not with ``FXSHARD_REMEMBER=0``."""
    return os.environ.get(VARIABLE, "1") != "0"


def remember(key: str, scheduled: Scheduled) -> None:
    """Keep scheduled graphs; where that cannot be, the next start traces again."""
    named = {("graph", phase): module for phase, module in scheduled.graphs.items()}
    outlines = {("outline", phase): module for phase, module in scheduled.outlines.items()}
    try:
        store.write(key, graphs.dumps({**named, **outlines}, scheduled.memory, scheduled.outputs, scheduled.left_out))
    except (Unnamed, OSError) as error:
        LOG.debug("these graphs will be traced again at the next start: %s", error)


def recall(key: str) -> Scheduled | None:
    """What was kept under a key, if anything was and it can be read."""
    data = store.read(key)
    if data is None:
        return None
    try:
        found, (memory, outputs, left_out) = graphs.loads(data)
    except Exception as error:  # of any kind, as what a damaged file may say is
        LOG.debug("graphs of an earlier start cannot be read, and are traced again: %s", error)
        store.remove(key)
        return None
    kept, outlines = (
        {phase: module for (kind, phase), module in found.items() if kind == each} for each in ("graph", "outline")
    )
    return Scheduled(kept, memory, outlines, outputs, left_out)


def forget(key: str) -> None:
    """Drop what was kept under a key: it did not fit."""
    LOG.debug("graphs of an earlier start do not fit, and are traced again")
    store.remove(key)
