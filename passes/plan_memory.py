"""Step: every gathered bucket and every gradient bucket gets a fixed place in the arena.

Staging buffers, through which some gathers pass, do so too. Requires events in their final order. Provides
``Event.slot`` on ``unshard`` and ``grad`` events, and the :class:`MemoryPlan`. Lifetimes are those of the whole step:
forward, then backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fxshard.passes.timeline import Timeline, goes
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.memory import Buffer, MemoryPlan, SlotRange, plan_slots
from fxshard.schedule.events import Event, Kind

_OPENS = {Kind.UNSHARD: "gathered", Kind.GRAD: "gradient"}
_CLOSES = {Kind.RESHARD: "gathered", Kind.WAIT: "staging", Kind.FINISH: "gradient"}

Buckets = Sequence[BucketPlan]


def plan_memory(timeline: Timeline, buckets: Buckets) -> MemoryPlan:
    return plan_slots(lifetimes(timeline.events, buckets))


def with_slots(timeline: Timeline, buckets: Buckets, plan: MemoryPlan) -> Timeline:
    """With the places of a plan on the events that take them."""
    gathered: dict[int, SlotRange] = {}
    placed: list[Event] = []
    for i, event in enumerate(timeline.events):
        slot = plan.slots.get((_what(event, buckets), event.bucket_index, i)) if event.kind in _OPENS else None
        if slot is not None and event.kind is Kind.UNSHARD:
            gathered[event.bucket_index] = slot
        elif event.kind is Kind.WAIT:
            # Backward gathers what forward kept again if another program took its place in between.
            slot = gathered.get(event.bucket_index)
        placed.append(event if slot is None else event.with_slot(slot))
    return timeline.with_events(placed)


def _what(event: Event, buckets: Buckets) -> str:
    """What an event takes memory for. A staged bucket has other memory; a gather only passes through the arena."""
    if event.kind is Kind.UNSHARD and buckets[event.bucket_index].staged_in_arena:
        return "staging"
    return _OPENS[event.kind]


def lifetimes(events: Sequence[Event], buckets: Buckets, kept: Collection[int] = ()) -> list[Buffer]:
    """What is in the arena from which event to which. Buckets that are ``kept`` stay there from forward to backward."""
    opened: dict[tuple[str, int], tuple[int, int]] = {}
    buffers: list[Buffer] = []
    for i, event in enumerate(events):
        kind = event.kind
        if (kind not in _OPENS and kind not in _CLOSES) or (event.bucket_index in kept and goes(event)):
            continue
        bucket = buckets[event.bucket_index]
        if kind in _CLOSES:
            key = _CLOSES[kind], bucket.index
            if key in opened:
                start, size = opened.pop(key)
                buffers.append(Buffer((*key, start), size, start, i))
            continue
        what = _what(event, buckets)
        if what == "staging" or (bucket.grad_in_arena if what == "gradient" else not bucket.resident):
            opened.setdefault((what, bucket.index), (i, event.bytes))
    end = len(events)
    buffers += [Buffer((*key, start), size, start, end) for key, (start, size) in opened.items()]
    return buffers
