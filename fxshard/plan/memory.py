"""The arena: one allocation in which every buffer of a program has a fixed place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from fxshard.plan.layout import aligned

GRANULE = 512
"""Slots start at multiples of this many bytes, as CUDA allocations do."""


@dataclass(frozen=True)
class SlotRange:
    """Bytes of the arena that a buffer occupies."""

    offset: int
    bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes

    def overlaps(self, other: SlotRange) -> bool:
        return self.offset < other.end and other.offset < self.end


@dataclass(frozen=True)
class Buffer:
    """Something that lives in the arena from event ``start`` to event ``stop`` of a timeline, both included."""

    key: tuple[str, int, int]
    bytes: int
    start: float
    stop: float

    def overlaps(self, other: Buffer) -> bool:
        return self.start <= other.stop and other.start <= self.stop


@dataclass(frozen=True)
class MemoryPlan:
    """Where each buffer lies, and how long the arena must be."""

    slots: dict[tuple[str, int, int], SlotRange]
    bytes: int
    leading: int = 0
    """How many of the gathers at the head of forward an optimizer step may start."""


def plan_slots(buffers: Sequence[Buffer]) -> MemoryPlan:
    """Colour the conflict graph of the buffers' lifetimes; each colour is a slot as long as its largest buffer.

    Larger buffers are coloured first, so a slot is never stretched by a latecomer; among equal ones the earlier, which
    is optimal for intervals of one size.
    """
    conflicts = nx.Graph()
    conflicts.add_nodes_from(range(len(buffers)))
    conflicts.add_edges_from((i, j) for j in range(len(buffers)) for i in range(j) if buffers[i].overlaps(buffers[j]))
    first = sorted(range(len(buffers)), key=lambda i: (-buffers[i].bytes, buffers[i].start, buffers[i].key))
    colours = nx.greedy_color(conflicts, strategy=lambda graph, colors: first)

    lengths: dict[int, int] = {}
    for i, colour in colours.items():
        lengths[colour] = max(lengths.get(colour, 0), aligned(buffers[i].bytes, GRANULE))
    offsets, cursor = {}, 0
    for colour in sorted(lengths):
        offsets[colour] = cursor
        cursor += lengths[colour]
    return MemoryPlan(
        {buffers[i].key: SlotRange(offsets[colour], buffers[i].bytes) for i, colour in colours.items()}, cursor
    )
