"""What happens to a captured model, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import fx

from fxshard._torch.errors import BudgetError
from fxshard.passes.context import PassContext
from fxshard.passes.defer_wgrad import defer_wgrad
from fxshard.passes.fill_arena import fill_arena, leading, leading_bytes, leads
from fxshard.passes.fuse_dense_swiglu import fuse_dense_swiglu
from fxshard.passes.fuse_grouped_swiglu import fuse_grouped_swiglu
from fxshard.passes.group_experts import group_experts
from fxshard.passes.insert_all_reduce import insert_all_reduce
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.passes.keep_resident import keep_resident
from fxshard.passes.open_experts import open_experts
from fxshard.passes.order_prefetch import order_prefetch
from fxshard.passes.pass_list import Pass, PassList, places
from fxshard.passes.plan_memory import plan_memory
from fxshard.passes.quantize_linears import quantize_linears
from fxshard.passes.recompute_param_views import recompute_param_views
from fxshard.passes.run import run_passes
from fxshard.passes.save_residuals import save_residuals
from fxshard.passes.stage_mxfp8 import stage_mxfp8
from fxshard.passes.write_gradients import write_gradients
from fxshard.plan.memory import MemoryPlan
from fxshard.schedule.events import META, Kind, Phase, events

BEFORE_AUTOGRAD: tuple[Pass, ...] = (group_experts, fuse_grouped_swiglu, fuse_dense_swiglu)
"""On Dynamo's graph: what these put there brings its own backward."""

JOINT: tuple[Pass, ...] = (open_experts, quantize_linears, recompute_param_views, save_residuals)
"""On forward and backward in one graph, before it is partitioned."""

INSERTING: dict[Phase, tuple[Pass, ...]] = {
    Phase.FORWARD: (insert_unshard, stage_mxfp8, insert_reshard),
    Phase.EVAL: (open_experts, quantize_linears, insert_unshard, stage_mxfp8, insert_reshard),
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

PASSES = PassList(
    captured=places(*BEFORE_AUTOGRAD),
    joint=places(*JOINT),
    forward=places(*INSERTING[Phase.FORWARD]),
    backward=places(*INSERTING[Phase.BACKWARD]),
    eval=places(*INSERTING[Phase.EVAL]),
)
"""The lists above as one value, from which a user derives another: ``fxshard.compile(passes=...)``."""

FARTHEST = 2
"""Gathers that may run ahead of forward if durations ask for it; more do where there is room for them anyway.
In backward it is one. There gathers take turns with reductions, and a second would hold up one that memory waits for.
"""


def chosen(context: PassContext) -> PassList:
    """The passes of a compilation: fxshard's, or those it was given."""
    return context.options.passes or PASSES


def before_autograd(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Run the passes over the graph that Dynamo captured, in place."""
    passes = chosen(context).captured
    if context.options.experts == "off":
        passes = tuple(place for place in passes if place.own)
    if passes:
        module = run_passes("captured", passes, module, context)
        module.recompile()
    return module


def before_partition(joint: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Run the passes over forward and backward in one graph."""
    return run_passes("joint", chosen(context).joint, joint, context)


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
    listed = dict(chosen(context).lists())
    for phase in inserted:
        inserted[phase] = run_passes(phase, listed[phase], inserted[phase], replace(context, phase=phase))
    return inserted


def order(
    scheduled: dict[Phase, fx.GraphModule], context: PassContext, resident_bytes: int
) -> tuple[dict[Phase, fx.GraphModule], MemoryPlan]:
    """When gathers start, what is kept, and where everything lies.

    What is gathered how often must not depend on durations, which differ between ranks whose batches do. It is settled
    on the plain order, one gather ahead; durations then only move the starts of gathers.
    """
    budget = context.options.budget
    if budget is not None:
        context = replace(context, arena_budget=budget - resident_bytes)
    with _watched("order_prefetch", scheduled, context):
        context = _plain_order(scheduled, context, resident_bytes)
    with _watched("keep_resident", scheduled, context):
        kept = keep_resident(scheduled, context)
    _say(
        context,
        "kept from forward to backward: %s",
        ", ".join(context.buckets[i].name for i in sorted(kept)) or "nothing",
    )
    with _watched("plan_memory", scheduled, context):
        memory = plan_memory(scheduled, context)
    context = _leading(scheduled, context, memory)
    if context.options.debug.prefetch is None and context.hardware is not None and context.ahead > 0:
        memory = _move_to_deadlines(scheduled, context)
    for module in scheduled.values():
        module.graph.lint()
        module.recompile()
    return scheduled, replace(memory, leading=context.leading)


def _plain_order(modules: Mapping[Phase, fx.GraphModule], context: PassContext, resident_bytes: int) -> PassContext:
    """Gathers as far ahead as asked for, or less where the budget is tight; one that is too tight is an error."""
    asked = context.options.debug.prefetch
    least: list[int] = []
    for ahead in range(asked if asked is not None else 1, -1, -1):
        context = replace(context, ahead=ahead)
        _order(modules, context)
        needed = plan_memory(modules, context).bytes
        fits = _fits(needed, context)
        _say(context, "%d gathers ahead: the arena needs %d bytes%s", ahead, needed, _verdict(fits, context))
        if fits:
            return context
        least.append(needed)
    assert context.options.budget is not None
    # Not always the last: how slots are packed can make a shorter look-ahead need more.
    raise BudgetError(context.options.budget, resident_bytes + min(least))


def _leading(modules: Mapping[Phase, fx.GraphModule], context: PassContext, memory: MemoryPlan) -> PassContext:
    """How many gathers forward starts with; under a budget, room is left for moving them out of the arena."""
    count = leading(modules, context, memory)
    _say(context, "forward starts with %d gathers, which an optimizer step may start", count)
    context = replace(context, leading=count)
    if context.arena_budget is None or count == 1:
        return context
    return replace(context, arena_budget=context.arena_budget - leading_bytes(modules, count))


def _move_to_deadlines(modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> MemoryPlan:
    """Start each gather as late as it can be hidden."""
    launches = [found for module in modules.values() for found in events(module.graph) if found[1].kind is Kind.UNSHARD]
    fitting = [(node, node.prev, event) for node, event in launches]
    for ahead in range(FARTHEST, context.ahead - 1, -1):
        attempt = replace(context, ahead=ahead, by_deadline=True)
        with _watched("order_prefetch by deadlines", modules, context):
            _order(modules, attempt)
        memory = plan_memory(modules, attempt)
        fits = _fits(memory.bytes, context)
        say = "gathers at their deadlines, up to %d ahead: the arena needs %d bytes%s"
        _say(context, say, ahead, memory.bytes, _verdict(fits, context))
        if fits:
            with _watched("fill_arena", modules, context):
                filled = fill_arena(modules, context, memory)
            if leads(modules, context.leading):
                return filled
    for node, before, event in fitting:  # back to where keep_resident found that they fit
        if node.prev is not before:
            before.append(node)
        node.meta[META] = event
    with _watched("fill_arena", modules, context):
        return fill_arena(modules, context, plan_memory(modules, context))


def _order(modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> None:
    for phase, module in modules.items():
        farthest = 1 if phase is Phase.BACKWARD and context.by_deadline else context.ahead
        order_prefetch(module, replace(context, phase=phase, ahead=min(context.ahead, farthest)))


def _fits(arena_bytes: int, context: PassContext) -> bool:
    return context.arena_budget is None or arena_bytes <= context.arena_budget


def _verdict(fits: bool, context: PassContext) -> str:
    if context.arena_budget is None:
        return ""
    return f", which {'fits' if fits else 'does not fit'} the {context.arena_budget} that memory_budget leaves"


def _say(context: PassContext, message: str, *values: object) -> None:
    if context.observer is not None:
        context.observer.say(message, *values)


@contextmanager
def _watched(name: str, modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> Iterator[None]:
    """A pass over the graphs of a whole step, for the observer."""
    if context.observer is None:
        yield
        return
    watches = [context.observer.begin(phase, name, module) for phase, module in modules.items()]
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    for watch, module in zip(watches, modules.values(), strict=True):
        watch.done(module, seconds)
