"""Deep calls in one piece of memory."""

from __future__ import annotations

import resource
import sys

import pytest

from fxshard.stack import VALUES, in_one_piece

DEPTHS = range(1, 160)
CALLS = 200


def test_it_calls_with_what_it_was_given_and_lets_errors_through() -> None:
    assert in_one_piece(int, "11", base=2) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        in_one_piece(int, "none")


def nothing() -> None:
    pass


nothing.__code__ = nothing.__code__.replace(co_stacksize=64)
"""Its frame is larger than that of ``at``, so that at some depth there is room for the one and not for the other."""


def at(depth: int) -> None:
    """Calls ``nothing`` often from so deep."""
    if depth:
        at(depth - 1)
    else:
        for _ in range(CALLS):
            nothing()


def new_pages(depth: int) -> int:
    """How often memory is touched for the first time meanwhile."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    at(depth)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_pages() -> int:
    return max(new_pages(depth) for depth in DEPTHS)


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="about how CPython keeps frames")
def test_no_depth_maps_memory_at_each_call() -> None:
    """Without it, one does: where a piece ends."""
    assert in_one_piece(most_pages) < CALLS // 4
    assert most_pages() >= CALLS
    assert in_one_piece.__code__.co_stacksize == VALUES
