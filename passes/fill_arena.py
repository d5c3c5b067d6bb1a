"""Step: gathers that come late start as early as there is room for them.

Requires gathers in their order and a plan of memory. Where the network is slower than compute, a gather cannot be
hidden, and what counts is that the network never rests. The arena has room that nothing needs for a while: that of
gradients during forward, that of kept buckets before they are gathered, all of it between two steps. A gather that
starts too late for its deadline moves to the first point from which there is room for it until it is given back, but
never past the gather before it: the order of gathers stays. In backward it moves only to where no reduction has
started: later a gather that comes early holds up a reduction, whose memory compute waits for. Where most gathers are
late, room for a little more is added, as far as a memory budget allows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fxshard.passes.plan_memory import Buckets, lifetimes
from fxshard.passes.timeline import START, Gather, Timeline
from fxshard.planner.layout import aligned
from fxshard.planner.memory import GRANULE, Arena, Buffer, MemoryPlan, SlotRange
from fxshard.planner.tuning import LEADING, MORE, MORE_IN_BUDGET, PLAINLY_LEADING
from fxshard.schedule.events import Kind, Phase

Node = tuple[Phase, int]
"""A runtime node: the graph, and its number there."""


def fill_arena(
    timeline: Timeline,
    buckets: Buckets,
    memory: MemoryPlan,
    late: Collection[Node],
    leading: int = 1,
    arena_budget: int | None = None,
) -> tuple[Timeline, MemoryPlan]:
    """Gathers that are ``late``, and those that lead forward, where there is room; and the plan with their places."""
    buffers = _buffers(timeline, buckets)
    heads = _forward_gathers(timeline)[:leading]
    candidates = {i for i in buffers if _node(timeline, i) in late or i in heads}
    if not candidates:
        return timeline, memory
    arena = Arena.of([*buffers.values()], memory, _room(timeline, memory, late, arena_budget))
    moves, arena = _moves(timeline, buffers, arena, candidates)
    if not moves:
        return timeline, memory

    def start(gather: Gather) -> Gather:
        node = gather.event.phase, gather.node
        if node not in moves:
            return gather
        why = "late: as early as there is room" if node in late else "leads: there is room for it between two steps"
        return replace(gather, event=replace(gather.event, why=why), after=moves[node])

    filled = timeline.each(lambda part: replace(part, gathers=tuple(map(start, part.gathers))))
    return filled, _plan(filled, buckets, arena)


def leading_gathers(
    timeline: Timeline, buckets: Buckets, memory: MemoryPlan, asked: int | None, arena_budget: int | None
) -> int:
    """How many gathers forward can start with, in places that the arena has anyway.

    An optimizer step gathers these for the next forward. Ranks whose batches differ have other durations, but must
    gather the same: so this is settled on the plain order. If another program comes between, it moves them out of the
    arena: under a budget there must be room for them twice, but for the first, which always stands there.
    """
    if asked is not None or timeline.of_phase(Phase.FORWARD) is None:
        return max(1, asked or 0)
    buffers = _buffers(timeline, buckets)
    least = 1 if arena_budget is not None else PLAINLY_LEADING
    first = [i for i in _forward_gathers(timeline)[:LEADING] if i in buffers]
    if not first:
        return least
    moves, arena = _moves(timeline, buffers, Arena.of([*buffers.values()], memory), set(first))
    head = _first_other(timeline)
    count, held = 0, 0
    for i in first:
        at_head = i < head or (_node(timeline, i) in moves and arena.placed[buffers[i].key][0].start < head)
        held += timeline.events[i].bytes if count else 0
        too_much = arena_budget is not None and count and memory.bytes + held > arena_budget
        if not at_head or too_much:
            break
        count += 1
    return max(count, least)


def leads(timeline: Timeline, count: int) -> bool:
    """Whether the first gathers of forward stand at its head."""
    gathers = _forward_gathers(timeline)
    return _first_other(timeline) >= min(count, len(gathers))


def leading_bytes(timeline: Timeline, count: int) -> int:
    """What the first gathers of forward bring, but for the very first."""
    return sum(timeline.events[i].bytes for i in _forward_gathers(timeline)[1:count])


def _buffers(timeline: Timeline, buckets: Buckets) -> dict[int, Buffer]:
    """What is in the arena, by the position of the event that takes it."""
    return {int(buffer.start): buffer for buffer in lifetimes(timeline.events, buckets)}


def _node(timeline: Timeline, position: int) -> Node:
    entry = timeline.entries[position]
    return entry.event.phase, entry.node


def _forward_gathers(timeline: Timeline) -> list[int]:
    """Their positions."""
    return [i for i, e in enumerate(timeline.events) if e.kind is Kind.UNSHARD and e.phase is Phase.FORWARD]


def _first_other(timeline: Timeline) -> int:
    """The first position that is no gather."""
    kinds = [event.kind for event in timeline.events]
    return next((i for i, kind in enumerate(kinds) if kind is not Kind.UNSHARD), len(kinds))


def _moves(
    timeline: Timeline, buffers: Mapping[int, Buffer], arena: Arena, candidates: set[int]
) -> tuple[dict[Node, int], Arena]:
    """{gather that can start earlier: the node after which it does}, and the arena with their places taken."""
    kinds = [event.kind for event in timeline.events]
    reduces = kinds.index(Kind.REDUCE) if Kind.REDUCE in kinds else len(kinds)
    moves: dict[Node, int] = {}
    begin = 0  # of the phase
    for part in timeline.phases:
        start, after = begin - 1, START  # of the gather before: the position and the node after which it starts
        for i, gather in enumerate(part.entries, begin):
            if not isinstance(gather, Gather):
                continue
            found = arena.earliest(buffers[i], start) if i in candidates else None
            if found is None or found.after > reduces:
                start, after = i, gather.after
                continue
            if found.after != start:
                after = timeline.entries[found.after].node if found.after >= begin else START
            start = found.after
            moves[part.phase, gather.node] = after
            arena = arena.moved(buffers[i], found)
        begin += len(part.entries)
    return moves, arena


def _room(timeline: Timeline, memory: MemoryPlan, late: Collection[Node], arena_budget: int | None) -> int:
    """Bytes that may be added to the arena: where most gathers are late, the network is what bounds the step."""
    sizes = [entry.event.bytes for entry in timeline.entries if (entry.event.phase, entry.node) in late]
    if 2 * len(sizes) <= sum(len(part.gathers) for part in timeline.phases):
        return 0
    largest = aligned(max(sizes), GRANULE)
    if arena_budget is None:
        return MORE * largest
    return max(0, min(arena_budget - memory.bytes, MORE_IN_BUDGET * largest))


def _plan(timeline: Timeline, buckets: Buckets, arena: Arena) -> MemoryPlan:
    """The plan of memory for events in their new positions: each buffer keeps the place that was found for it."""
    found: dict[tuple[str, int], list[SlotRange]] = {}
    for buffer, slot in sorted(arena.placed.values(), key=lambda entry: entry[0].start):
        found.setdefault(buffer.key[:2], []).append(slot)
    now = sorted(lifetimes(timeline.events, buckets), key=lambda buffer: buffer.start)
    return MemoryPlan({buffer.key: found[buffer.key[:2]].pop(0) for buffer in now}, arena.bytes)
