"""From partitioned graphs to a schedule: pure, deterministic, no process group."""

from __future__ import annotations

from torch import fx

from fxshard.passes.drop_inputs import drop_inputs
from fxshard.passes.pipeline import chosen
from fxshard.passes.pipeline import schedule as run_pipeline
from fxshard.passes.run import blaming
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.stages import Partitioned, Scheduled
from fxshard.plan.memory import MemoryPlan
from fxshard.schedule.events import Phase
from fxshard.schedule.observe import Observer
from fxshard.schedule.record import record, resident_bytes
from fxshard.schedule.schedule import Schedule


def schedule(partitioned: Partitioned, plan: ShardingPlan, observer: Observer | None = None) -> Scheduled:
    """Insert the collectives, decide when each starts and how long buffers live, and record it as a schedule."""
    context = plan.context(next(iter(partitioned.graphs)), observer)
    with blaming(chosen(context)):
        graphs, memory = run_pipeline(partitioned.graphs, context, resident_bytes(plan.buckets))
        schedules = _record(graphs, memory, plan)
        for kind, each in schedules.items():
            if observer is not None:
                observer.schedule(each, kind)
            if plan.options.debug.verify:
                each.verify()
    if partitioned.dropped:
        drop_inputs(graphs, partitioned.dropped, partitioned.outputs)
    return Scheduled(graphs, memory, partitioned.outputs, schedules, partitioned.layers_folded)


def _record(graphs: dict[Phase, fx.GraphModule], memory: MemoryPlan, plan: ShardingPlan) -> dict[str, Schedule]:
    """What the graphs will do, by name."""
    emitted = record(
        graphs,
        plan.buckets,
        memory,
        ranks=plan.ranks,
        zero=plan.options.zero,
        budget=plan.options.budget,
        carry=memory.leading if plan.own_optimizer and plan.one_graph else 0,
    )
    if Phase.BACKWARD not in graphs:
        return {"eval": emitted}
    made = {"train": emitted}
    if plan.ranks > 1:
        made["accumulate"] = emitted.accumulating()
    return made
