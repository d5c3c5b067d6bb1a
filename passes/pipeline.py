"""What happens to a captured model, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from fxshard.errors import BudgetError
from fxshard.events import Phase
from fxshard.passes.context import PassContext
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.passes.keep_resident import keep_resident
from fxshard.passes.order_prefetch import order_prefetch
from fxshard.passes.plan_memory import plan_memory
from fxshard.passes.write_gradients import write_gradients
from fxshard.plan.memory import MemoryPlan

Pass = Callable[[fx.GraphModule, PassContext], fx.GraphModule]

INSERTING: dict[Phase, tuple[Pass, ...]] = {
    Phase.FORWARD: (insert_unshard, insert_reshard),
    Phase.EVAL: (insert_unshard, insert_reshard),
    Phase.BACKWARD: (insert_unshard, insert_reshard, insert_reduce_scatter, write_gradients),
}

DEEPEST = 8
"""Gathers that may run ahead under a budget, if it allows."""


def schedule(
    modules: Mapping[Phase, fx.GraphModule], context: PassContext, resident_bytes: int
) -> tuple[dict[Phase, fx.GraphModule], MemoryPlan]:
    """Run the passes over the graphs of a step (or the one of an evaluation) and plan its memory.

    ``resident_bytes`` is what a rank holds anyway; the arena may take what a memory budget leaves beside it.
    """
    budget = context.options.memory_budget
    if budget is not None:
        context = replace(context, arena_budget=budget - resident_bytes, ahead=DEEPEST)
    scheduled = dict(modules)
    for phase in scheduled:
        for run in INSERTING[phase]:
            scheduled[phase] = run(scheduled[phase], replace(context, phase=phase))
    context = _prefetch_within_budget(scheduled, context, resident_bytes)
    keep_resident(scheduled, context)
    memory = plan_memory(scheduled, context)
    for module in scheduled.values():
        module.graph.lint()
        module.recompile()
    return scheduled, memory


def _prefetch_within_budget(
    modules: Mapping[Phase, fx.GraphModule], context: PassContext, resident_bytes: int
) -> PassContext:
    """Order the gathers, as far ahead as the budget allows; an infeasible budget is an error that says what is not."""
    while True:
        for phase, module in modules.items():
            order_prefetch(module, replace(context, phase=phase))
        if context.arena_budget is None:
            return context
        smallest = plan_memory(modules, context).bytes
        if smallest <= context.arena_budget:
            return context
        depth = context.options.prefetch if context.options.prefetch is not None else context.ahead
        if depth == 0:
            assert context.options.memory_budget is not None
            raise BudgetError(context.options.memory_budget, resident_bytes + smallest)
        if context.options.prefetch is not None:
            context = replace(context, options=replace(context.options, prefetch=depth - 1))
        else:
            context = replace(context, ahead=depth - 1)
