"""The arena: one allocation in which every buffer of a program has a fixed place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxshard.plan.layout import aligned

GRANULE = 512
"""Slots start at multiples of this many bytes, as CUDA allocations do."""

Key = tuple[str, int, int]
"""What lies there, of which bucket, and the position of the event that takes it."""


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
    slots: list[list[Buffer]] = []
    chosen: dict[Key, int] = {}
    for buffer in sorted(buffers, key=lambda each: (-each.bytes, each.start, each.key)):
        free = (i for i, held in enumerate(slots) if not any(buffer.overlaps(other) for other in held))
        number = next(free, len(slots))
        if number == len(slots):
            slots.append([])
        slots[number].append(buffer)
        chosen[buffer.key] = number
    lengths = [aligned(held[0].bytes, GRANULE) for held in slots]
    offsets = [sum(lengths[:i]) for i in range(len(slots))]
    sizes = {buffer.key: buffer.bytes for buffer in buffers}
    return MemoryPlan({key: SlotRange(offsets[i], sizes[key]) for key, i in chosen.items()}, sum(lengths))


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
        found: list[Start] = []
        size = aligned(buffer.bytes, GRANULE)
        ends = {aligned(slot.end, GRANULE) for _, slot in self.placed.values()}
        for begin, end in self.stretches:
            for offset in sorted({begin, *[at for at in ends if begin < at <= end - size]}):
                if offset + size > end:
                    continue
                free = self._free_from(buffer, SlotRange(offset, size))
                if free is not None:
                    found.append(Start(max(free, not_before), offset))
        best = min(found, key=lambda start: (start.after, start.offset), default=None)
        return best if best is not None and best.after + 1 < buffer.start else None

    def moved(self, buffer: Buffer, start: Start) -> Arena:
        """With the buffer there from then on."""
        earlier = replace(buffer, start=start.after + 0.5)
        return replace(self, placed=self.placed | {buffer.key: (earlier, SlotRange(start.offset, buffer.bytes))})

    def _free_from(self, buffer: Buffer, slot: SlotRange) -> int | None:
        """The last event before a buffer's start at which a place is taken; None if it is taken during its life."""
        last = -1
        for other, taken in self.placed.values():
            if taken.overlaps(slot) and other.key != buffer.key:
                if other.overlaps(buffer):
                    return None
                if other.stop < buffer.start:
                    last = max(last, int(other.stop))
        return last
