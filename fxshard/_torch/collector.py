"""Python's garbage collector, paused while a model is compiled.

Tracing and lowering make a million objects that stay, and little garbage. Each full collection among them looks at all
objects of the program: of a first step of 17 to 19 s they took 1.8 to 3.6 (docs/design/compile-path.md). Nothing here
imports torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collection inside, in no thread. One that the user has switched off stays off."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
