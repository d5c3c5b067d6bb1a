"""What a memory budget made a step compute twice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recomputed:
    """Values of one kind, one or more in each layer of a kind, that backward computes again instead of reading them."""

    name: str
    """The module that computes them, layers counted as ``*``, and the operator."""
    count: int
    """How many there are in the graph that was traced, in which layers that repeat stand once."""
    bytes: int
    """What they would take together from forward to backward, in that graph."""
    seconds: float
    """What computing them again takes there, by the cost model."""
