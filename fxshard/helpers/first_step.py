"""What is put off until the first step has been taken, in which everything that takes time is waited for."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from weakref import WeakMethod

from fxshard.helpers import beside
from fxshard.helpers.crew import dismiss

_put_off: list[WeakMethod[Callable[[], None]]] = []


def put_off(act: Callable[[], None]) -> None:
    """Do something in a thread, when the first step has been taken, or where the program ends without one.

    ``act`` is a method. If nobody else has its object by then, nobody wants it done.
    """
    _put_off.append(WeakMethod(act))


def taken() -> None:
    """An optimizer has stepped, or a forward runs again: who compiled for the first step is not needed any more."""
    dismiss()
    for act in _wanted():
        beside.behind(act)


def _wanted() -> Iterator[Callable[[], None]]:
    while _put_off:
        act = _put_off.pop()()
        if act is not None:
            yield act


@atexit.register
def _at_the_end() -> None:
    """No thread can be started any more."""
    for act in _wanted():
        beside.attempt(act)
