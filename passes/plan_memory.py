"""Step: every gathered bucket and every gradient bucket gets a fixed place in the arena.

Staging buffers, through which some gathers pass, do so too. Requires events in their final order. Provides
``Event.slot`` on ``unshard`` and ``grad`` events, and the :class:`MemoryPlan`. Lifetimes are those of the whole step:
forward, then backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxshard.passes.timeline import Timeline
from fxshard.plan.buckets import BucketPlan
from fxshard.plan.memory import Buffer, MemoryPlan, SlotRange, plan_slots
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


def lifetimes(events: Sequence[Event], buckets: Buckets) -> list[Buffer]:
    """What is in the arena from which event to which."""
    opened: dict[tuple[str, int], tuple[int, int]] = {}
    buffers: list[Buffer] = []
    for i, event in enumerate(events):
        bucket = buckets[event.bucket_index]
        if event.kind in _OPENS:
            what = _what(event, buckets)
            in_arena = {"gathered": not bucket.resident, "staging": True, "gradient": bucket.grad_in_arena}
            if in_arena[what]:
                opened.setdefault((what, bucket.index), (i, event.bytes))
        elif event.kind in _CLOSES and (key := (_CLOSES[event.kind], bucket.index)) in opened:
            start, size = opened.pop(key)
            buffers.append(Buffer((*key, start), size, start, i))
    end = len(events)
    buffers += [Buffer((*key, start), size, start, end) for key, (start, size) in opened.items()]
    return buffers
