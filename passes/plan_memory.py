"""Step: every gathered bucket and every gradient bucket gets a fixed place in the arena.

Staging buffers, through which some gathers pass, do so too. Requires the runtime nodes in their final order. Provides
``Event.slot`` on ``unshard`` and ``grad`` nodes, and the :class:`MemoryPlan`. Lifetimes are those of the whole step:
forward, then backward.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxshard.passes.context import PassContext
from fxshard.plan.memory import Buffer, MemoryPlan, SlotRange, plan_slots
from fxshard.schedule.events import META, Event, Kind, Phase, events

_OPENS = {Kind.UNSHARD: "gathered", Kind.GRAD: "gradient"}
_CLOSES = {Kind.RESHARD: "gathered", Kind.WAIT: "staging", Kind.FINISH: "gradient"}


def plan_memory(modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> MemoryPlan:
    timeline = [event for module in modules.values() for _, event in events(module.graph)]
    plan = plan_slots(lifetimes(timeline, context))
    assign(modules, context, plan)
    return plan


def assign(modules: Mapping[Phase, fx.GraphModule], context: PassContext, plan: MemoryPlan) -> None:
    """Write the places of a plan to the events that take them."""
    timeline = [(node, event) for module in modules.values() for node, event in events(module.graph)]
    gathered: dict[int, SlotRange] = {}
    for i, (node, event) in enumerate(timeline):
        index = event.bucket_index
        slot = plan.slots.get((_what(event, context), index, i)) if event.kind in _OPENS else None
        if slot is not None:
            node.meta[META] = event.with_slot(slot)
            if event.kind is Kind.UNSHARD:
                gathered[index] = slot
        elif event.kind is Kind.WAIT and index in gathered:
            # Backward gathers what forward kept again if another program took its place in between.
            node.meta[META] = event.with_slot(gathered[index])


def _what(event: Event, context: PassContext) -> str:
    """What an event takes memory for. A staged bucket is elsewhere; a gather only passes through the arena."""
    if event.kind is Kind.UNSHARD and context.buckets[event.bucket_index].staged_in_arena:
        return "staging"
    return _OPENS[event.kind]


def lifetimes(timeline: list[Event], context: PassContext) -> list[Buffer]:
    """What is in the arena from which event to which."""
    opened: dict[tuple[str, int], tuple[int, int]] = {}
    buffers: list[Buffer] = []
    for i, event in enumerate(timeline):
        bucket = context.buckets[event.bucket_index]
        if event.kind in _OPENS:
            what = _what(event, context)
            in_arena = {"gathered": not bucket.resident, "staging": True, "gradient": bucket.grad_in_arena}
            if in_arena[what]:
                opened.setdefault((what, bucket.index), (i, event.bytes))
        elif event.kind in _CLOSES and (key := (_CLOSES[event.kind], bucket.index)) in opened:
            start, size = opened.pop(key)
            buffers.append(Buffer((*key, start), size, start, i))
    end = len(timeline)
    buffers += [Buffer((*key, start), size, start, end) for key, (start, size) in opened.items()]
    return buffers
