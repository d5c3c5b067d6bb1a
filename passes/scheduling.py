"""From partitioned graphs to a schedule: pure, deterministic, no process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from fxshard.passes.budget_trades import Trade, trades
from fxshard.passes.context import PassContext
from fxshard.passes.drop_inputs import drop_inputs
from fxshard.passes.fit_budget import Split, fit_budget
from fxshard.passes.pipeline import chosen, insert_events, order
from fxshard.passes.run import blaming
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.stages import Partitioned, Scheduled
from fxshard.planner.memory import MemoryPlan
from fxshard.schedule.events import Phase
from fxshard.schedule.observe import Observer
from fxshard.schedule.record import record
from fxshard.schedule.schedule import Schedule


def schedule(partitioned: Partitioned, plan: ShardingPlan, observer: Observer | None = None) -> Scheduled:
    """Insert the collectives, decide when each starts and how long buffers live, and record it as a schedule."""
    context = plan.context(next(iter(partitioned.graphs)), observer)
    with blaming(chosen(context)):
        carries = plan.own_optimizer and plan.one_graph
        chosen_for: dict[str, Any] = {"recomputed": partitioned.recomputed}
        decisions = None
        buckets = plan.buckets
        if plan.options.budget is None:
            inserted = insert_events(partitioned.graphs, context)
        else:
            fit = fit_budget(_splits(partitioned, context, carries), plan.options.budget)
            inserted, decisions, buckets = fit.split.graphs, fit.decisions, fit.kept.buckets
            chosen_for = {"recomputed": fit.split.recomputed, "offloaded": fit.split.offloaded}
            names = [", ".join(each.name for each in found) or "nothing" for found in chosen_for.values()]
            say = (
                "fit_budget: an arena of %d bytes, computed again: %s, on the host: %s, optimizer state in %s; "
                "the simulated step takes %.6f s"
            )
            context.say(say, decisions.memory.bytes, *names, fit.kept, fit.seconds)
        graphs, memory = order(inserted, context, decisions)
        schedules = _record(graphs, memory, replace(plan, buckets=buckets), chosen_for)
        for kind, each in schedules.items():
            if observer is not None:
                observer.schedule(each, kind)
            if plan.options.debug.verify:
                each.verify()
    if partitioned.dropped:
        drop_inputs(graphs, partitioned.dropped, partitioned.outputs)
    return Scheduled(graphs, memory, partitioned.outputs, schedules, partitioned.layers_folded)


def trade(partitioned: Partitioned, plan: ShardingPlan) -> tuple[Trade, ...]:
    """The simulated step over memory budgets."""
    context = plan.context(next(iter(partitioned.graphs)))
    with blaming(chosen(context)):
        return trades(_splits(partitioned, context, plan.own_optimizer and plan.one_graph))


def _splits(partitioned: Partitioned, context: PassContext, carries: bool) -> Iterator[Split]:
    """A step as it was partitioned, and with less and less saved for backward."""
    found: Partitioned | None = partitioned
    while found is not None:
        graphs = insert_events(found.graphs, context)
        yield Split.of(graphs, context, carries, found.outputs, found.recomputed)
        found = found.tighter() if context.options.activations != "offload" else None


def _record(
    graphs: dict[Phase, fx.GraphModule], memory: MemoryPlan, plan: ShardingPlan, chosen_for: Mapping[str, Any]
) -> dict[str, Schedule]:
    """What the graphs will do, by name."""
    emitted = record(
        graphs,
        plan.buckets,
        memory,
        ranks=plan.ranks,
        zero=plan.options.zero,
        budget=plan.options.budget,
        carry=memory.leading if plan.own_optimizer and plan.one_graph else 0,
        fused=plan.options.fused,
        **chosen_for,
    )
    if Phase.BACKWARD not in graphs:
        return {"eval": emitted}
    made = {"train": emitted}
    if plan.ranks > 1:
        made["accumulate"] = emitted.accumulating()
    return made
