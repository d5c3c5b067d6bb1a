"""The arena: one allocation in which every buffer of a program has a fixed place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxshard.planner.layout import aligned

GRANULE = 512
"""Slots start at multiples of this many bytes, as CUDA allocations do."""

Key = tuple[str, int, int]
"""(kind of buffer, its bucket, the position of the event that takes it)"""


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

    key: Key
    bytes: int
    start: float
    stop: float

    def overlaps(self, other: Buffer) -> bool:
        return self.start <= other.stop and other.start <= self.stop


@dataclass(frozen=True)
class MemoryPlan:
    """Where each buffer lies, and how long the arena must be."""

    slots: dict[Key, SlotRange]
    bytes: int
    leading: int = 0
    """How many of the gathers at the head of forward an optimizer step may start."""


def plan_slots(buffers: Sequence[Buffer]) -> MemoryPlan:
    """Buffers that are alive at the same time lie in different slots; a slot is as long as its largest buffer.

    Larger buffers choose first, so a slot is never stretched by a latecomer; among equal ones the earlier, which is
    optimal for intervals of one size.
    """
    slots: list[_Slot] = []
    chosen: list[tuple[Buffer, _Slot]] = []
    end = 0
    for buffer in sorted(buffers, key=lambda each: (-each.bytes, each.start, each.key)):
        slot = next((slot for slot in slots if slot.take(buffer)), None)
        if slot is None:
            slot = _Slot(end, [buffer.start], [buffer.stop])
            slots.append(slot)
            end += aligned(buffer.bytes, GRANULE)
        chosen.append((buffer, slot))
    return MemoryPlan({buffer.key: SlotRange(slot.offset, buffer.bytes) for buffer, slot in chosen}, end)


@dataclass(frozen=True)
class _Slot:
    """A place in the arena, and when it is taken: starts and stops of buffers that never overlap, in order."""

    offset: int
    starts: list[float]
    stops: list[float]

    def take(self, buffer: Buffer) -> bool:
        """Add a buffer, if the place is free as long as it lives."""
        after = bisect_right(self.starts, buffer.stop)
        if after and self.stops[after - 1] >= buffer.start:
            return False
        self.starts.insert(after, buffer.start)
        self.stops.insert(after, buffer.stop)
        return True


@dataclass(frozen=True)
class Start:
    """Where in the arena a buffer may go, and the event after which it then starts."""

    after: int
    offset: int


@dataclass(frozen=True)
class Arena:
    """A plan in the making: what lies where and when, and where a buffer that starts earlier could go."""

    placed: dict[Key, tuple[Buffer, SlotRange]]
    stretches: tuple[tuple[int, int], ...]
    """Ranges that one buffer or several smaller ones in a row may take."""

    @classmethod
    def of(cls, buffers: Sequence[Buffer], plan: MemoryPlan, room: int = 0) -> Arena:
        """The slots of a plan; ``room``: bytes that may be added at the end."""
        offsets = sorted({slot.offset for slot in plan.slots.values()})
        stretches = [*zip(offsets, [*offsets[1:], plan.bytes], strict=True)]
        if room:
            stretches.append((plan.bytes, plan.bytes + room))
        return cls({buffer.key: (buffer, plan.slots[buffer.key]) for buffer in buffers}, tuple(stretches))

    @property
    def bytes(self) -> int:
        return max((aligned(slot.end, GRANULE) for _, slot in self.placed.values()), default=0)

    def earliest(self, buffer: Buffer, not_before: int) -> Start | None:
        """The first start that some place allows, if that is earlier than where the buffer starts now."""
        size = aligned(buffer.bytes, GRANULE)
        others = [(slot, other) for other, slot in self.placed.values() if other.key != buffer.key]
        # What lies there while the buffer is alive, and what lay there before: (offset, end, until when).
        alive = [(slot.offset, slot.end) for slot, other in others if other.overlaps(buffer)]
        past = [(slot.offset, slot.end, int(other.stop)) for slot, other in others if other.stop < buffer.start]
        ends = sorted({aligned(slot.end, GRANULE) for _, slot in self.placed.values()})
        best, before = None, buffer.start - 1
        for begin, stop in self.stretches:
            for offset in (begin, *[at for at in ends if begin < at]):
                end = offset + size
                if end > stop:
                    break
                if any(low < end and offset < high for low, high in alive):
                    continue
                free = max((until for low, high, until in past if low < end and offset < high), default=-1)
                if max(free, not_before) < before:  # of several the first place
                    before = max(free, not_before)
                    best = Start(before, offset)
        return best

    def moved(self, buffer: Buffer, start: Start) -> Arena:
        """With the buffer there from then on."""
        earlier = replace(buffer, start=start.after + 0.5)
        return replace(self, placed=self.placed | {buffer.key: (earlier, SlotRange(start.offset, buffer.bytes))})
