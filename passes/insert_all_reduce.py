"""Backward: with replicas of each shard (HSDP), a reduced shard is added up over them.

Requires ``insert_reduce_scatter``. Provides an ``all_reduce`` per bucket that has replicas, in the order of the
reductions. It stands before the next reduction, or before its own ``finish`` if that comes first: on CUDA it starts
when its reduction is over, wherever it stands; on the CPU the host has to wait for that, so it is asked for late.
"""

from __future__ import annotations

from torch import fx

from fxshard.passes.context import PassContext
from fxshard.schedule.events import Kind, Phase, events, insert


def insert_all_reduce(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    reduced: list[int] = []  # and not yet added up
    for node, event in list(events(graph)):
        if event.kind is Kind.REDUCE:
            due = reduced
            reduced = [event.bucket_index] if context.buckets[event.bucket_index].adds_replicas else []
        elif event.kind is Kind.FINISH and event.bucket_index in reduced:
            due, reduced = reduced, []
        else:
            continue
        with graph.inserting_before(node):
            for index in due:
                why = "its shard is reduced: adds up the replicas"
                insert(
                    graph,
                    Kind.ALL_REDUCE,
                    context.buckets[index],
                    phase=Phase.BACKWARD,
                    group=context.group,
                    why=why,
                )
    return module
