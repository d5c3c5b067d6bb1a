"""Step: which buckets stay unsharded between forward and backward instead of being gathered twice.

Requires the runtime nodes of forward and backward. Removes the ``reshard`` of a kept bucket in forward and its
``unshard`` in backward. What forward uses last backward uses first, so buckets are tried from the end of forward: each
one kept saves a gather and holds its memory for the shortest time of those that are left. Without a budget only what
fits into the arena that the step needs anyway is kept; with one, as much as the budget allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from fxshard.passes.context import PassContext
from fxshard.passes.plan_memory import lifetimes
from fxshard.plan.gather_modes import Gather
from fxshard.plan.memory import plan_slots
from fxshard.schedule.events import META, Event, Kind, Phase, events


def keep_resident(modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> frozenset[int]:
    """Keep what may be kept; returns the buckets."""
    if Phase.BACKWARD not in modules or not context.options.debug.keep_resident:
        return frozenset()
    nodes = {
        (event.phase, event.kind, event.bucket_index): node
        for module in modules.values()
        for node, event in events(module.graph)
    }
    timeline = [event for module in modules.values() for _, event in events(module.graph)]
    allowed = _arena_bytes(timeline, context)
    if context.arena_budget is not None:
        allowed = max(allowed, context.arena_budget)

    kept: list[int] = []
    for index in _from_the_end_of_forward(timeline):
        drop = {(Phase.FORWARD, Kind.RESHARD, index), (Phase.BACKWARD, Kind.UNSHARD, index)}
        # Gathered quantized, forward and backward need different copies: there is nothing to keep.
        if not drop <= nodes.keys() or context.buckets[index].gather is Gather.DIRECT:
            continue
        shorter = [event for event in timeline if (event.phase, event.kind, event.bucket_index) not in drop]
        if _arena_bytes(shorter, context) > allowed:
            break
        timeline = shorter
        kept.append(index)
        for key in drop:
            nodes[key].graph.erase_node(nodes[key])
        wait = nodes[Phase.BACKWARD, Kind.WAIT, index]
        wait.meta[META] = replace(wait.meta[META], why=f"kept since forward, {wait.meta[META].why}")
    return frozenset(kept)


def _from_the_end_of_forward(timeline: list[Event]) -> list[int]:
    waits = [event.bucket_index for event in timeline if event.kind is Kind.WAIT and event.phase is Phase.FORWARD]
    return waits[::-1]


def _arena_bytes(timeline: list[Event], context: PassContext) -> int:
    return plan_slots(lifetimes(timeline, context)).bytes
