"""Step: which buckets stay unsharded between forward and backward instead of being gathered twice.

Requires the events of forward and backward, gathers in the order of a fixed depth. Removes the ``reshard`` of a kept
bucket in forward and its ``unshard`` in backward. What forward uses last backward uses first, so buckets are tried from
the end of forward: each one kept saves a gather and holds its memory for the shortest time of those that are left.
Without a budget what forward uses last is kept, as FSDP2 does, and besides it only what fits into the arena that the
step needs anyway; with one, as much as it allows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from fxshard.passes.context import PassContext
from fxshard.passes.plan_memory import lifetimes
from fxshard.passes.timeline import Timeline
from fxshard.planner.gather_modes import Gather
from fxshard.planner.memory import plan_slots
from fxshard.schedule.events import Kind, Phase


@dataclass(frozen=True)
class Order:
    """A step with gathers up to ``depth`` ahead, and the arena that it needs, neither of which depends on a budget."""

    timeline: Timeline
    context: PassContext
    depth: int = 1
    arenas: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    """{number of buckets that are kept: bytes}, as far as they were asked for."""

    def needed(self, kept: Collection[int] = ()) -> int:
        """Bytes of the arena. ``kept``: the first of the buckets that can be, which come in a fixed order."""
        if len(kept) not in self.arenas:
            buffers = lifetimes(self.timeline.events, self.context.buckets, kept)
            self.arenas[len(kept)] = plan_slots(buffers).bytes
        return self.arenas[len(kept)]


def keep_resident(order: Order, arena_budget: int | None = None) -> tuple[Timeline, frozenset[int]]:
    """The timeline without the events that go, and the buckets that are kept."""
    timeline, context = order.timeline, order.context
    forward, backward = timeline.of_phase(Phase.FORWARD), timeline.of_phase(Phase.BACKWARD)
    if forward is None or backward is None or not context.options.debug.keep_resident:
        return timeline, frozenset()
    allowed = order.needed()
    if arena_budget is not None:
        allowed = max(allowed, arena_budget)
    twice = forward.places(Kind.RESHARD).keys() & {gather.bucket for gather in backward.gathers}
    kept: frozenset[int] = frozenset()
    from_the_end = [index for index in reversed(forward.places(Kind.WAIT)) if not context.buckets[index].resident]
    for index in from_the_end:
        bucket = context.buckets[index]
        # Where forward and backward need different quantized copies there is nothing to keep.
        if index not in twice or (bucket.gather is Gather.DIRECT and bucket.all_copies.number > 1):
            continue
        needed = order.needed(kept | {index})
        if arena_budget is None and index == from_the_end[0]:
            allowed = max(allowed, needed)
        if needed > allowed:
            break
        kept |= {index}
    timeline = timeline.keeping(kept)
    reasons = [
        replace(event, why=f"kept since forward, {event.why}")
        if event.kind is Kind.WAIT and event.phase is Phase.BACKWARD and event.bucket_index in kept
        else event
        for event in timeline.events
    ]
    return timeline.with_events(reasons), kept
