"""What happens to a captured model, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from fxshard.errors import BudgetError
from fxshard.events import META, Kind, Phase, events
from fxshard.passes.context import PassContext
from fxshard.passes.defer_wgrad import defer_wgrad
from fxshard.passes.fill_arena import fill_arena
from fxshard.passes.fuse_grouped_swiglu import fuse_grouped_swiglu
from fxshard.passes.group_experts import group_experts
from fxshard.passes.insert_all_reduce import insert_all_reduce
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.passes.keep_resident import keep_resident
from fxshard.passes.order_prefetch import order_prefetch
from fxshard.passes.plan_memory import plan_memory
from fxshard.passes.stage_mxfp8 import stage_mxfp8
from fxshard.passes.write_gradients import write_gradients
from fxshard.plan.memory import MemoryPlan

Pass = Callable[[fx.GraphModule, PassContext], fx.GraphModule]

BEFORE_AUTOGRAD: tuple[Pass, ...] = (group_experts, fuse_grouped_swiglu)
"""On Dynamo's graph: what these put there brings its own backward."""

INSERTING: dict[Phase, tuple[Pass, ...]] = {
    Phase.FORWARD: (insert_unshard, stage_mxfp8, insert_reshard),
    Phase.EVAL: (insert_unshard, stage_mxfp8, insert_reshard),
    Phase.BACKWARD: (
        defer_wgrad,
        insert_unshard,
        stage_mxfp8,
        insert_reshard,
        insert_reduce_scatter,
        insert_all_reduce,
        write_gradients,
    ),
}

FARTHEST = 2
"""Gathers that may run ahead of forward if durations ask for it; more do where there is room for them anyway.
In backward it is one. There gathers take turns with reductions, and a second would hold up one that memory waits for.
"""


def before_autograd(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Run the passes over the graph that Dynamo captured, in place."""
    if context.options.experts != "off":
        for run in BEFORE_AUTOGRAD:
            module = run(module, context)
        module.recompile()
    return module


def schedule(
    modules: Mapping[Phase, fx.GraphModule], context: PassContext, resident_bytes: int
) -> tuple[dict[Phase, fx.GraphModule], MemoryPlan]:
    """Run the passes over the graphs of a step (or the one of an evaluation) and plan its memory.

    ``resident_bytes`` is what a rank holds anyway; the arena may take what a memory budget leaves beside it.
    """
    return order(insert_events(modules, context), context, resident_bytes)


def insert_events(modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> dict[Phase, fx.GraphModule]:
    """Gathers where they are needed, reductions where gradients are complete. Neither machine nor budget counts."""
    inserted = dict(modules)
    for phase in inserted:
        for run in INSERTING[phase]:
            inserted[phase] = run(inserted[phase], replace(context, phase=phase))
    return inserted


def order(
    scheduled: dict[Phase, fx.GraphModule], context: PassContext, resident_bytes: int
) -> tuple[dict[Phase, fx.GraphModule], MemoryPlan]:
    """When gathers start, what is kept, and where everything lies.

    What is gathered how often must not depend on durations, which differ between ranks whose batches do. It is settled
    on the plain order, one gather ahead; durations then only move the starts of gathers.
    """
    budget = context.options.memory_budget
    if budget is not None:
        context = replace(context, arena_budget=budget - resident_bytes)
    context = _plain_order(scheduled, context, resident_bytes)
    keep_resident(scheduled, context)
    memory = plan_memory(scheduled, context)
    if context.options.prefetch is None and context.hardware is not None and context.ahead > 0:
        memory = _move_to_deadlines(scheduled, context)
    for module in scheduled.values():
        module.graph.lint()
        module.recompile()
    return scheduled, memory


def _plain_order(modules: Mapping[Phase, fx.GraphModule], context: PassContext, resident_bytes: int) -> PassContext:
    """Gathers as far ahead as asked for, or less where the budget is tight; one that is too tight is an error."""
    chosen = context.options.prefetch
    least: list[int] = []
    for ahead in range(chosen if chosen is not None else 1, -1, -1):
        context = replace(context, ahead=ahead)
        _order(modules, context)
        needed = plan_memory(modules, context).bytes
        if _fits(needed, context):
            return context
        least.append(needed)
    assert context.options.memory_budget is not None
    # Not always the last: how slots are packed can make a shorter look-ahead need more.
    raise BudgetError(context.options.memory_budget, resident_bytes + min(least))


def _move_to_deadlines(modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> MemoryPlan:
    """Start each gather as late as it can be hidden; one that cannot be, as early as there is room for it."""
    launches = [found for module in modules.values() for found in events(module.graph) if found[1].kind is Kind.UNSHARD]
    fitting = [(node, node.prev, event) for node, event in launches]
    for ahead in range(FARTHEST, context.ahead - 1, -1):
        attempt = replace(context, ahead=ahead, by_deadline=True)
        _order(modules, attempt)
        memory = plan_memory(modules, attempt)
        if _fits(memory.bytes, context):
            break
    else:
        for node, before, event in fitting:  # back to where keep_resident found that they fit
            if node.prev is not before:
                before.append(node)
            node.meta[META] = event
        memory = plan_memory(modules, context)
    return fill_arena(modules, context, memory)


def _order(modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> None:
    for phase, module in modules.items():
        farthest = 1 if phase is Phase.BACKWARD and context.by_deadline else context.ahead
        order_prefetch(module, replace(context, phase=phase, ahead=min(context.ahead, farthest)))


def _fits(arena_bytes: int, context: PassContext) -> bool:
    return context.arena_budget is None or arena_bytes <= context.arena_budget
