"""Names of nodes: those that tracing the whole model would give, so that a plan reads like the run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fxshard.repetition.periods import Unrepeatable

AGAIN = "again_"
"""Begins the names of what backward computes again while it stands in one graph with forward."""

SHARED = "again_for_all_"
"""The same, of a constant that a first layer makes for all."""


def own_name(name: str) -> str:
    """The name of a node in a graph that has only forward or only backward."""
    return name.removeprefix(SHARED).removeprefix(AGAIN)


@dataclass(frozen=True)
class Numbering:
    """How the numbers in names grow from layer to layer.

    They count the nodes of one stem in the order in which they were made: forward's layers, then backward's.
    """

    rates: dict[str, tuple[int, int]]
    """{stem: by how much its number grows with each layer in forward and in backward}"""
    forward: Collection[str]
    """Names of forward's nodes."""
    early: Collection[str]
    """Those of them that stand in the first two layers, or ahead of them."""
    removed: int
    """How many layers were left out."""

    def repeated(self, name: str, *, constant: bool) -> str:
        """What a node of backward is called in one graph with forward; ``constant``: others share it."""
        if name not in self.forward:
            return name
        return (SHARED if constant and name in self.early else AGAIN) + name

    def name(self, name: str, shift: int) -> str:
        """The name of a node of a layer that is moved by ``shift``."""
        own = own_name(name)
        stem, number = numbered(own)
        if name.startswith(SHARED):
            shift = 0
        made = (shift, 0) if own in self.forward else (self.removed, self.removed - shift)
        for grown, before in zip(self.rates.get(stem, (0, 0)), made, strict=True):
            # Numbers count those that were made before, or behind where a pass worked from the end to the beginning.
            number += grown * before if grown > 0 else -grown * (self.removed - before)
        return name[: len(name) - len(own)] + (f"{stem}_{number}" if number else stem)


def rates(forward: Iterable[tuple[str, str]], backward: Iterable[tuple[str, str]]) -> dict[str, tuple[int, int]]:
    """How numbers grow, from pairs of names in a layer and in the one that is made next."""
    found: dict[str, tuple[int, int]] = {}
    for direction, pairs in enumerate((forward, backward)):
        for low, high in pairs:
            stem, number = numbered(low)
            grown = numbered(high)[1] - number
            ahead, behind = found.get(stem, (0, 0))
            found[stem] = (grown, behind) if direction == 0 else (ahead, grown)
    if any(ahead * behind < 0 for ahead, behind in found.values()):
        raise Unrepeatable
    return found


def numbered(name: str) -> tuple[str, int]:
    """Stem and number of a name."""
    match = re.fullmatch(r"(.*)_(\d+)", name)
    return (match[1], int(match[2])) if match is not None else (name, 0)
