"""What is put off until the first step has been taken, in which everything that takes time is waited for."""

from __future__ import annotations

from collections.abc import Callable

from fxshard.helpers import beside
from fxshard.helpers.crew import dismiss

_put_off: list[Callable[[], None]] = []


def put_off(act: Callable[[], None]) -> None:
    """Do something in a thread, when the first step has been taken."""
    _put_off.append(act)


def taken() -> None:
    """An optimizer has stepped, or a forward runs again: who compiled for the first step is not needed any more."""
    dismiss()
    while _put_off:
        beside.behind(_put_off.pop())
