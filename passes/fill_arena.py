"""Step: gathers that come late start as early as there is room for them.

Requires gathers in their order and a plan of memory. Where the network is slower than compute, a gather cannot be
hidden, and what counts is that the network never rests. The arena has room that nobody needs for a while: that of
gradients during forward, that of kept buckets before they are gathered, all of it between two steps. A gather that
starts too late for its deadline moves to the first point from which there is room for it until it is given back, but
never past the gather before it: the order of gathers stays. In backward it moves only to where no reduction has
started: later a gather that comes early holds up a reduction, whose memory compute waits for. Where most gathers are
late, room for a little more is added, as far as a memory budget allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from fxshard.passes.context import PassContext
from fxshard.passes.order_prefetch import PLAINLY_LEADING, late_gathers, put_behind
from fxshard.passes.plan_memory import assign, lifetimes
from fxshard.plan.layout import aligned
from fxshard.plan.memory import GRANULE, Buffer, MemoryPlan, SlotRange
from fxshard.schedule.events import META, Event, Kind, Phase, events

LEADING = 8
"""Gathers that forward starts with at most, if there is room for them."""

MORE, MORE_IN_BUDGET = 1, 8
"""Gathers for which room may be added where most are late, without and with a budget."""


@dataclass(frozen=True)
class _Start:
    """Where in the arena a gather may go, and the position behind which it then starts."""

    behind: int
    offset: int


@dataclass
class _Arena:
    """What lies where and when. A stretch is what one buffer or several smaller ones in a row may take."""

    placed: dict[tuple[str, int, int], tuple[Buffer, SlotRange]]
    stretches: list[tuple[int, int]]

    @classmethod
    def of(cls, buffers: list[Buffer], memory: MemoryPlan, room: int) -> _Arena:
        offsets = sorted({slot.offset for slot in memory.slots.values()})
        stretches = list(zip(offsets, [*offsets[1:], memory.bytes], strict=True))
        if room:
            stretches.append((memory.bytes, memory.bytes + room))
        return cls({buffer.key: (buffer, memory.slots[buffer.key]) for buffer in buffers}, stretches)

    @property
    def bytes(self) -> int:
        return max((aligned(slot.end, GRANULE) for _, slot in self.placed.values()), default=0)

    def earliest(self, buffer: Buffer, not_before: int) -> _Start | None:
        """The first start that some place allows, if that is earlier than where the gather stands."""
        found: list[_Start] = []
        size = aligned(buffer.bytes, GRANULE)
        ends = {aligned(slot.end, GRANULE) for _, slot in self.placed.values()}
        for begin, end in self.stretches:
            for offset in sorted({begin, *[at for at in ends if begin < at <= end - size]}):
                if offset + size > end:
                    continue
                free = self._free_from(buffer, SlotRange(offset, size))
                if free is not None:
                    found.append(_Start(max(free, not_before), offset))
        best = min(found, key=lambda start: (start.behind, start.offset), default=None)
        return best if best is not None and best.behind + 1 < buffer.start else None

    def _free_from(self, buffer: Buffer, slot: SlotRange) -> int | None:
        """The last position before a buffer's start at which something else lies in a place; None if in its way."""
        last = -1
        for other, taken in self.placed.values():
            if taken.overlaps(slot) and other.key != buffer.key:
                if other.overlaps(buffer):
                    return None
                if other.stop < buffer.start:
                    last = max(last, int(other.stop))
        return last

    def move(self, buffer: Buffer, start: _Start) -> None:
        moved = replace(buffer, start=start.behind + 0.5)
        self.placed[buffer.key] = moved, SlotRange(start.offset, buffer.bytes)


def fill_arena(modules: Mapping[Phase, fx.GraphModule], context: PassContext, memory: MemoryPlan) -> MemoryPlan:
    """Move what comes late, and what leads forward; returns the plan with its places."""
    late = {node for at, module in modules.items() for node in late_gathers(module, replace(context, phase=at))}
    timeline, buffers = _timeline(modules, context)
    leads_forward = _gathers(timeline)[: context.leading]
    candidates = {i for i in buffers if timeline[i][0] in late or i in leads_forward}
    if not candidates:
        return memory
    arena = _Arena.of(list(buffers.values()), memory, _room(memory, timeline, late, context))
    moves = _moves(timeline, buffers, arena, candidates)
    if not moves:
        return memory
    for node, behind in moves:
        put_behind(node, behind)
        why = "late: as early as there is room" if node in late else "leads: there is room for it between two steps"
        node.meta[META] = replace(node.meta[META], why=why)
    return _plan(modules, context, arena)


def leading(modules: Mapping[Phase, fx.GraphModule], context: PassContext, memory: MemoryPlan) -> int:
    """How many gathers forward can start with, in places that the arena has anyway.

    An optimizer step gathers these for the next forward. Ranks whose batches differ have other durations, but must
    gather the same: so this is settled on the plain order. If another program comes between, it moves them out of the
    arena: under a budget there must be room for them twice, but for the first, which always stands there.
    """
    if context.options.debug.prefetch is not None or Phase.FORWARD not in modules:
        return max(1, context.options.debug.prefetch or 0)
    timeline, buffers = _timeline(modules, context)
    least = 1 if context.arena_budget is not None else PLAINLY_LEADING
    first = [i for i in _gathers(timeline)[:LEADING] if i in buffers]
    if not first:
        return least
    arena = _Arena.of(list(buffers.values()), memory, 0)
    moved = {node for node, _ in _moves(timeline, buffers, arena, set(first))}
    head = _first_other(timeline)
    count, held = 0, 0
    for i in first:
        at_head = i < head or (timeline[i][0] in moved and arena.placed[buffers[i].key][0].start < head)
        held += timeline[i][1].bytes if count else 0
        too_much = context.arena_budget is not None and count and memory.bytes + held > context.arena_budget
        if not at_head or too_much:
            break
        count += 1
    return max(count, least)


def leads(modules: Mapping[Phase, fx.GraphModule], count: int) -> bool:
    """Whether the first gathers of forward stand at its head."""
    if Phase.FORWARD not in modules:
        return True
    timeline = list(events(modules[Phase.FORWARD].graph))
    return _first_other(timeline) >= min(count, len(_gathers(timeline)))


def leading_bytes(modules: Mapping[Phase, fx.GraphModule], count: int) -> int:
    """What the first gathers of forward bring, but for the very first."""
    timeline = list(events(modules[Phase.FORWARD].graph))
    return sum(timeline[i][1].bytes for i in _gathers(timeline)[1:count])


Timeline = list[tuple[fx.Node, Event]]


def _timeline(modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> tuple[Timeline, dict[int, Buffer]]:
    """The events of a step in order, and the buffers by the position at which each is taken."""
    timeline = [entry for module in modules.values() for entry in events(module.graph)]
    return timeline, {int(buffer.start): buffer for buffer in lifetimes([event for _, event in timeline], context)}


def _gathers(timeline: Timeline) -> list[int]:
    """Positions of the gathers of forward."""
    return [i for i, (_, event) in enumerate(timeline) if event.kind is Kind.UNSHARD and event.phase is Phase.FORWARD]


def _first_other(timeline: Timeline) -> int:
    """The first position that is no gather."""
    return next((i for i, (_, event) in enumerate(timeline) if event.kind is not Kind.UNSHARD), len(timeline))


def _moves(
    timeline: Timeline, buffers: Mapping[int, Buffer], arena: _Arena, candidates: set[int]
) -> list[tuple[fx.Node, fx.Node | None]]:
    """Gathers that can start earlier, and the node behind which each does; their places in the arena are taken."""
    reduces = next((i for i, (_, event) in enumerate(timeline) if event.kind is Kind.REDUCE), len(timeline))
    moves: list[tuple[fx.Node, fx.Node | None]] = []
    phase: Phase | None = None
    before: fx.Node | None = None
    start = first = -1
    for i, (node, event) in enumerate(timeline):
        if event.kind is not Kind.UNSHARD:
            continue
        if event.phase is not phase:
            phase, before = event.phase, None
            start = first = _first_of(phase, timeline) - 1
        found = arena.earliest(buffers[i], start) if i in candidates else None
        if found is None or found.behind > reduces:
            start = i
        else:
            behind = before if found.behind == start else timeline[found.behind][0] if found.behind > first else None
            moves.append((node, behind))
            arena.move(buffers[i], found)
            start = found.behind
        before = node
    return moves


def _first_of(phase: Phase, timeline: Timeline) -> int:
    return next(i for i, (_, event) in enumerate(timeline) if event.phase is phase)


def _room(memory: MemoryPlan, timeline: Timeline, late: set[fx.Node], context: PassContext) -> int:
    """Bytes that may be added to the arena: where most gathers are late, the network is what bounds the step."""
    gathers = [node for node, event in timeline if event.kind is Kind.UNSHARD]
    if 2 * len(late) <= len(gathers):
        return 0
    largest = aligned(max(event.bytes for node, event in timeline if node in late), GRANULE)
    if context.arena_budget is None:
        return MORE * largest
    return max(0, min(context.arena_budget - memory.bytes, MORE_IN_BUDGET * largest))


def _plan(modules: Mapping[Phase, fx.GraphModule], context: PassContext, arena: _Arena) -> MemoryPlan:
    """The plan of memory for events in their new positions: each buffer keeps the place that was found for it."""
    found: dict[tuple[str, int], list[SlotRange]] = {}
    for buffer, slot in sorted(arena.placed.values(), key=lambda entry: entry[0].start):
        found.setdefault(buffer.key[:2], []).append(slot)
    now = lifetimes([event for module in modules.values() for _, event in events(module.graph)], context)
    slots = {buffer.key: found[buffer.key[:2]].pop(0) for buffer in sorted(now, key=lambda buffer: buffer.start)}
    plan = MemoryPlan(slots, arena.bytes)
    assign(modules, context, plan)
    return plan
