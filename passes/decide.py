"""Step: when gathers start, what is kept, and where everything lies, decided on the events as data.

Deciding changes no graph: it goes from one :class:`Timeline` to another, and ``apply_decisions`` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxshard.passes.context import PassContext
from fxshard.passes.fill_arena import fill_arena, leading_bytes, leading_gathers, leads
from fxshard.passes.keep_resident import Order, keep_resident
from fxshard.passes.order_prefetch import Places, late_gathers, latest_starts, order_prefetch
from fxshard.passes.plan_memory import plan_memory, with_slots
from fxshard.passes.timeline import Timeline
from fxshard.planner.memory import MemoryPlan
from fxshard.planner.tuning import FARTHEST, FARTHEST_IN_BACKWARD
from fxshard.schedule.events import Phase


@dataclass(frozen=True)
class Decisions:
    """A step as it shall be."""

    timeline: Timeline
    """Where gathers start, with reasons and slots. Events that are not in it are removed."""
    kept: frozenset[int]
    """Buckets that stay gathered from forward to backward."""
    memory: MemoryPlan


def plain_orders(timeline: Timeline, context: PassContext) -> tuple[Order, ...]:
    """Gathers as far ahead as asked for, and less: what several budgets have in common."""
    asked = context.options.debug.prefetch
    depths = range(asked if asked is not None else 1, -1, -1)

    def ahead(depth: int) -> Timeline:
        return timeline.each(lambda part: order_prefetch(part, depth))

    return tuple(Order(ahead(depth), context, depth) for depth in depths)


def decide(orders: Sequence[Order], budget: int | None = None) -> Decisions:
    """Order a step for a machine, and for an arena of at most ``budget`` bytes, which :func:`least_arena` must fit.

    What is gathered how often must not depend on durations, which differ between ranks whose batches do. It is settled
    on the plain order, one gather ahead; durations then only move the starts of gathers.
    """
    order = _that_fits(orders, budget)
    context = order.context
    debug, buckets = context.options.debug, context.buckets
    timeline, kept = keep_resident(order, budget)
    names = ", ".join(buckets[i].name for i in sorted(kept))
    context.say("keep_resident: kept from forward to backward: %s", names or "nothing")
    memory = plan_memory(timeline, buckets)
    leading = leading_gathers(timeline, buckets, memory, debug.prefetch, budget)
    context.say("fill_arena: forward starts with %d gathers, which an optimizer step may start", leading)
    if budget is not None:  # room is left for moving those out of the arena
        budget -= leading_bytes(timeline, leading)
    if debug.prefetch is None and context.hardware is not None and order.depth > 0:
        timeline, memory = _by_deadlines(timeline, context, order.depth, leading, budget)
    return Decisions(with_slots(timeline, buckets, memory), kept, replace(memory, leading=leading))


def least_arena(orders: Sequence[Order]) -> int:
    """The smallest arena that some order of gathers needs."""
    # Not always with none ahead: how slots are packed can make a shorter look-ahead need more.
    return min(order.needed() for order in orders)


def _that_fits(orders: Sequence[Order], budget: int | None) -> Order:
    """Gathers as far ahead as asked for, or less where the budget is tight."""
    for order in orders:
        needed = order.needed()
        say = "order_prefetch: %d gathers ahead: the arena needs %d bytes%s"
        order.context.say(say, order.depth, needed, _verdict(needed, budget))
        if _fits(needed, budget):
            return order
    raise AssertionError(f"no arena fits {budget} bytes; least_arena says what the smallest is")


def _by_deadlines(
    plain: Timeline, context: PassContext, depth: int, leading: int, budget: int | None
) -> tuple[Timeline, MemoryPlan]:
    """Each gather as late as it can be hidden; the plain order where that does not fit."""
    buckets = context.buckets
    latest = {part.phase: latest_starts(part, context) for part in plain.phases}
    for ahead in range(FARTHEST, depth - 1, -1):
        ordered = _at_deadlines(plain, latest, ahead, leading)
        memory = plan_memory(ordered, buckets)
        say = "order_prefetch: gathers at their deadlines, up to %d ahead: the arena needs %d bytes%s"
        context.say(say, ahead, memory.bytes, _verdict(memory.bytes, budget))
        if _fits(memory.bytes, budget):
            filled = fill_arena(ordered, buckets, memory, _late(ordered, latest), leading, budget)
            if leads(filled[0], leading):
                return filled
    return fill_arena(plain, buckets, plan_memory(plain, buckets), _late(plain, latest), leading, budget)


def _at_deadlines(plain: Timeline, latest: Mapping[Phase, Places], ahead: int, leading: int) -> Timeline:
    farthest = {Phase.BACKWARD: FARTHEST_IN_BACKWARD}
    return plain.each(
        lambda part: order_prefetch(part, min(ahead, farthest.get(part.phase, ahead)), latest[part.phase], leading)
    )


def _late(timeline: Timeline, latest: Mapping[Phase, Places]) -> set[tuple[Phase, int]]:
    return {node for part in timeline.phases for node in late_gathers(part, latest[part.phase])}


def _fits(arena_bytes: int, budget: int | None) -> bool:
    return budget is None or arena_bytes <= budget


def _verdict(arena_bytes: int, budget: int | None) -> str:
    if budget is None:
        return ""
    fits = "fits" if _fits(arena_bytes, budget) else "does not fit"
    return f", which {fits} the {budget} that memory_budget leaves"
