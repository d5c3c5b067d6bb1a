"""Python calls in one piece of memory.

CPython keeps the frames of calls in pieces of 16 KiB. It gives a piece back to the system when the last call in it
returns, and asks for it again at the next call. Compilers call deep, up and down, and wherever a loop of theirs stands
at the end of a piece, each call maps memory and touches it for the first time: a tenth of tracing a model, and by
chance more. A frame that is larger than a piece gets one of its own size; what it calls finds room in the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

VALUES = 1 << 16
"""That many the frame says it may hold, half a megabyte. Its piece is the next power of two."""


def in_one_piece(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call something whose calls will go deep."""
    return act(*args, **kwargs)


in_one_piece.__code__ = in_one_piece.__code__.replace(co_stacksize=VALUES)
