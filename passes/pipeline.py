"""What happens to a captured model, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import fx

from fxshard.passes.apply_decisions import apply_decisions
from fxshard.passes.chunk_loss import chunk_loss
from fxshard.passes.context import PassContext
from fxshard.passes.decide import Decisions, decide, plain_orders
from fxshard.passes.defer_wgrad import defer_wgrad
from fxshard.passes.extern_tables import extern_tables
from fxshard.passes.fuse_dense_swiglu import fuse_dense_swiglu
from fxshard.passes.fuse_grouped_swiglu import fuse_grouped_swiglu
from fxshard.passes.gather_gradients import gather_gradients
from fxshard.passes.group_experts import group_experts
from fxshard.passes.insert_all_reduce import insert_all_reduce
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.passes.measure_logits import measure_logits
from fxshard.passes.open_experts import open_experts
from fxshard.passes.order_collectives import order_collectives
from fxshard.passes.pass_list import Pass, PassList, places
from fxshard.passes.quantize_linears import quantize_linears
from fxshard.passes.recognize_masks import recognize_masks
from fxshard.passes.recompute_operands import recompute_operands
from fxshard.passes.recompute_param_views import recompute_param_views
from fxshard.passes.run import run_passes
from fxshard.passes.save_residuals import save_residuals
from fxshard.passes.scale_narrow import scale_narrow
from fxshard.passes.stage_quantized import stage_quantized
from fxshard.passes.sum_products import sum_products
from fxshard.passes.timeline import Timeline
from fxshard.passes.verify_each import verify_step
from fxshard.passes.write_gradients import write_gradients
from fxshard.planner.memory import MemoryPlan
from fxshard.schedule.events import Phase

EXPERTS: tuple[Pass, ...] = (group_experts, fuse_grouped_swiglu, fuse_dense_swiglu)
"""What ``experts="off"`` leaves out."""

BEFORE_AUTOGRAD: tuple[Pass, ...] = (recognize_masks, measure_logits, chunk_loss, scale_narrow, *EXPERTS)
"""On Dynamo's graph: what these put there brings its own backward."""

JOINT: tuple[Pass, ...] = (
    extern_tables,
    gather_gradients,
    open_experts,
    quantize_linears,
    sum_products,
    recompute_param_views,
    recompute_operands,
    save_residuals,
)
"""On forward and backward in one graph, before it is partitioned."""

INSERTING: dict[Phase, tuple[Pass, ...]] = {
    Phase.FORWARD: (order_collectives, insert_unshard, stage_quantized, insert_reshard),
    Phase.EVAL: (
        extern_tables,
        open_experts,
        quantize_linears,
        sum_products,
        order_collectives,
        insert_unshard,
        stage_quantized,
        insert_reshard,
    ),
    Phase.BACKWARD: (
        order_collectives,
        defer_wgrad,
        insert_unshard,
        stage_quantized,
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


def chosen(context: PassContext) -> PassList:
    """The passes of a compilation: fxshard's, or those it was given."""
    return context.options.passes or PASSES


def before_autograd(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Run the passes over the graph that Dynamo captured, in place."""
    passes = chosen(context).captured
    if context.options.experts == "off":
        passes = tuple(place for place in passes if place.run not in EXPERTS)
    if passes:
        module = run_passes("captured", passes, module, context)
        module.recompile()
    return module


def before_partition(joint: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Run the passes over forward and backward in one graph."""
    return run_passes("joint", chosen(context).joint, joint, context)


def insert_events(modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> dict[Phase, fx.GraphModule]:
    """Gathers where they are needed, reductions where gradients are complete. Neither machine nor budget counts."""
    inserted = dict(modules)
    listed = dict(chosen(context).lists())
    for phase in inserted:
        inserted[phase] = run_passes(phase, listed[phase], inserted[phase], replace(context, phase=phase))
    return inserted


def order(
    scheduled: dict[Phase, fx.GraphModule], context: PassContext, decisions: Decisions | None = None
) -> tuple[dict[Phase, fx.GraphModule], MemoryPlan]:
    """When gathers start, what is kept, and where everything lies: decided on the events, then applied, in place."""
    decisions = decisions or decide(plain_orders(Timeline.of(scheduled), context))
    with _watched("apply_decisions", scheduled, context):
        apply_decisions(scheduled, decisions)
    if context.options.debug.verify_each_pass:
        verify_step("apply_decisions", scheduled, context, decisions.memory)
    return scheduled, decisions.memory


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
