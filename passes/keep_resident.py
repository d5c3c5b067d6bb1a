"""Step: which buckets stay unsharded between forward and backward instead of being gathered twice.

Requires the events of forward and backward, gathers in the order of a fixed depth. Removes the ``reshard`` of a kept
bucket in forward and its ``unshard`` in backward. What forward uses last backward uses first, so buckets are tried from
the end of forward: each one kept saves a gather and holds its memory for the shortest time of those that are left.
Without a budget what forward uses last is kept, as FSDP2 does, and besides it only what fits into the arena that the
step needs anyway; with one, as much as it allows.
"""

from __future__ import annotations

from dataclasses import replace

from fxshard.passes.context import PassContext
from fxshard.passes.plan_memory import lifetimes, plan_memory
from fxshard.passes.timeline import Timeline
from fxshard.plan.gather_modes import Gather
from fxshard.plan.memory import plan_slots
from fxshard.schedule.events import Kind, Phase


def keep_resident(
    timeline: Timeline, context: PassContext, arena_budget: int | None = None
) -> tuple[Timeline, frozenset[int]]:
    """The timeline without the events that go, and the buckets that are kept."""
    forward, backward = timeline.of_phase(Phase.FORWARD), timeline.of_phase(Phase.BACKWARD)
    if forward is None or backward is None or not context.options.debug.keep_resident:
        return timeline, frozenset()
    allowed = plan_memory(timeline, context.buckets).bytes
    events = timeline.events
    if arena_budget is not None:
        allowed = max(allowed, arena_budget)
    twice = forward.places(Kind.RESHARD).keys() & {gather.bucket for gather in backward.gathers}
    kept: set[int] = set()
    from_the_end = [index for index in reversed(forward.places(Kind.WAIT)) if not context.buckets[index].resident]
    for index in from_the_end:
        bucket = context.buckets[index]
        # Where forward and backward need different quantized copies there is nothing to keep.
        if index not in twice or (bucket.gather is Gather.DIRECT and bucket.all_copies.number > 1):
            continue
        needed = plan_slots(lifetimes(events, context.buckets, kept | {index})).bytes
        if arena_budget is None and index == from_the_end[0]:
            allowed = max(allowed, needed)
        if needed > allowed:
            break
        kept.add(index)
    timeline = timeline.keeping(kept)
    reasons = [
        replace(event, why=f"kept since forward, {event.why}")
        if event.kind is Kind.WAIT and event.phase is Phase.BACKWARD and event.bucket_index in kept
        else event
        for event in timeline.events
    ]
    return timeline.with_events(reasons), frozenset(kept)
