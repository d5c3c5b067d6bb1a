"""ZeRO stages as placements: where parameters, gradients and optimizer state live. One table, no code paths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Which of the three is sharded over the data-parallel ranks; what is not sharded is replicated."""

    param: bool
    grad: bool
    state: bool


ZERO: dict[int, Placement] = {
    0: Placement(param=False, grad=False, state=False),
    1: Placement(param=False, grad=False, state=True),
    2: Placement(param=False, grad=True, state=True),
    3: Placement(param=True, grad=True, state=True),
}


@dataclass(frozen=True)
class BytesPerRank:
    """What one rank holds at rest, in bytes."""

    param: int
    grad: int
    state: int
