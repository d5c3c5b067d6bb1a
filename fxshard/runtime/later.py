"""Programs that are made when they first run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxshard import _compat
from fxshard.errors import CaptureError, FxshardError
from fxshard.garbage import no_garbage_collection
from fxshard.helpers import first_step
from fxshard.lowering import BoxedCallable
from fxshard.stack import in_one_piece


def later(make: Callable[[], BoxedCallable], what: str, behind: Callable[[], None] | None = None) -> BoxedCallable:
    """What ``make`` will make when it is first called, as AOTAutograd wants it: it takes its arguments in a list.

    It is made as if nobody ran a model: whatever modes the caller has entered do not reach the compiler. ``behind`` is
    called behind the first call.
    """
    made: list[BoxedCallable] = []

    def run(args: list[Any]) -> Any:
        if made:
            first_step.taken()  # whoever calls this again does not wait for a backward that could be compiled
            return made[0](args)
        made.append(_make(make, what))
        results = made[0](args)
        if behind is not None:
            behind()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _make(make: Callable[[], BoxedCallable], what: str) -> BoxedCallable:
    try:
        with no_garbage_collection(), _compat.as_a_compiler():
            return in_one_piece(make)
    except FxshardError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{what} was captured and scheduled, but could not be compiled: {type(error).__name__}: {error}\n"
            'Compile with fxshard.compile(..., lowering="eager") to see whether Inductor is the cause.'
        ) from error
