"""Python's garbage collector, held back where it would look at a million objects that stay.

Importing a compiler, tracing a model and lowering it make objects that live as long as the model does. Each collection
among them takes a good part of a second. Nothing here imports torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OF_PYTHON = 1000
"""Objects that the interpreter may have frozen itself: 3.12 starts with some hundred."""


@contextmanager
def no_garbage_collection(wanted: bool = True) -> Iterator[None]:
    """No collection inside; the next one comes when it would have come behind it."""
    enabled = wanted and gc.isenabled()
    if enabled:
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def make_old() -> None:
    """Count all objects among the old ones, without looking at any: most collections look at newer ones only.

    Where little is garbage, behind importing or compiling: some tens of megabytes wait for a full collection. Nothing
    happens where somebody has frozen objects, which would not stay frozen.
    """
    if gc.get_freeze_count() <= OF_PYTHON:
        gc.freeze()
        gc.unfreeze()
