"""What Dynamo holds of a model: callables that are emptied when the model is freed, in code that never is.

Dynamo removes what it compiled when the compiled code object is freed. Dynamo does not choose that moment: the flight
recorder of ``torch.distributed`` notes the Python stack of each collective, owns the code objects in it for its next
2000 collectives, and releases them inside a later collective of any thread, under a lock of its own. If a model were
freed there, another thread that starts a collective (an asynchronous save) would hold the GIL and wait for that lock,
and the first one would hold the lock and wait for the GIL.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fxshard._torch.errors import StateError

_KEPT: dict[int, types.CodeType] = {}
"""Code objects by identity (equality compares contents). They are small, and as many as there were compilations."""


class Compiled:
    """A compiled graph as Dynamo calls it, until it is emptied."""

    __slots__ = ("_called", "_run")  # Dynamo wraps it in a function that would get a copy of its __dict__

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run: Callable[..., Any] | None = run
        self._called = False

    def __call__(self, *args: Any) -> Any:
        if self._run is None:
            raise StateError("the model that this code was compiled for does not exist any more; compile a new one")
        if not self._called:
            self._called = True
            if dist.is_initialized():
                keep_callers()  # ahead of the first collective that the graph starts
        return self._run(*args)

    def empty(self) -> None:
        self._run = None


class CompiledGraphs:
    """All graphs that were compiled for one model."""

    def __init__(self) -> None:
        self._all: list[Compiled] = []

    def add(self, run: Callable[..., Any]) -> Compiled:
        self._all.append(Compiled(run))
        return self._all[-1]

    def live_as_long_as(self, model: object) -> None:
        """Empty them when ``model`` is freed: its memory and process groups do not wait for Dynamo's code."""
        weakref.finalize(model, self.empty).atexit = False

    def empty(self) -> None:
        for compiled in self._all:
            compiled.empty()
        self._all.clear()


def keep_callers() -> None:
    """Keep the code of all callers that weak references point to, as Dynamo's do to what it compiled."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if weakref.getweakrefcount(frame.f_code):
            _KEPT[id(frame.f_code)] = frame.f_code
        frame = frame.f_back
