"""What happens to a captured model, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from fxshard.events import Phase
from fxshard.passes.context import PassContext, param_inputs
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.passes.order_prefetch import order_prefetch
from fxshard.passes.plan_memory import plan_memory
from fxshard.passes.write_gradients import write_gradients
from fxshard.plan.memory import MemoryPlan

Pass = Callable[[fx.GraphModule, PassContext], fx.GraphModule]

SCHEDULING: dict[Phase, tuple[Pass, ...]] = {
    Phase.FORWARD: (insert_unshard, insert_reshard, order_prefetch),
    Phase.EVAL: (insert_unshard, insert_reshard, order_prefetch),
    Phase.BACKWARD: (insert_unshard, insert_reshard, insert_reduce_scatter, write_gradients, order_prefetch),
}


def schedule(
    modules: Mapping[Phase, fx.GraphModule], context: PassContext
) -> tuple[dict[Phase, fx.GraphModule], MemoryPlan]:
    """Run the scheduling passes over the graphs of a step (or the one of an evaluation) and plan its memory."""
    context = replace(context, kept=_kept_for_backward(modules, context))
    scheduled = {}
    for phase, module in modules.items():
        for run in SCHEDULING[phase]:
            module = run(module, replace(context, phase=phase))
            module.graph.lint()
        module.recompile()
        scheduled[phase] = module
    return scheduled, plan_memory(scheduled, context)


def _kept_for_backward(modules: Mapping[Phase, fx.GraphModule], context: PassContext) -> frozenset[int]:
    """The bucket that forward uses last and backward first: releasing it would only gather it again at once."""
    if Phase.BACKWARD not in modules:
        return frozenset()

    def first_uses(phase: Phase) -> list[int]:
        order = {node: i for i, node in enumerate(modules[phase].graph.nodes)}
        first: dict[int, int] = {}
        for node, ref in param_inputs(modules[phase].graph).items():
            for user in node.users:
                if user.op != "output":
                    first[ref.bucket] = min(first.get(ref.bucket, order[user]), order[user])
        return sorted(first, key=first.__getitem__)

    forward, backward = first_uses(Phase.FORWARD), first_uses(Phase.BACKWARD)
    return frozenset(forward[-1:]) & frozenset(backward[:1])

