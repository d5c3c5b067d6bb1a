"""Before autograd: a dense gated MLP becomes one operator where its kernel is faster than what the compiler makes.

Requires nothing; loops over experts (``group_experts``) go before it. Provides ``fxshard::dense_swiglu`` in the place
of ``down(silu(gate(x)) · up(x))``, gate and up joined or not, and a line in the report for each, fused or not.
Where it pays was measured (docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxshard.kernels.case import Case
from fxshard.kernels.choose import Choice, choose_dense
from fxshard.kernels.dense_op import dense_mlp
from fxshard.kernels.glu import SWIGLU
from fxshard.kernels.report import Fused, Left
from fxshard.passes.calls import changed_between, dense_product, place, rewrite_nested, shape, stand_in, value
from fxshard.passes.context import PassContext
from fxshard.passes.match_glu import GatedMlp, Miss, NoGate, match_gated_mlp


def fuse_dense_swiglu(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return rewrite_nested(module, lambda graph: _fuse(graph, context, nested=graph is not module.graph))


def _fuse(graph: fx.Graph, context: PassContext, *, nested: bool) -> None:
    for node in list(graph.nodes):
        down = dense_product(node)
        if down is None:
            continue
        try:
            mlp = match_gated_mlp(down, dense_product)
            choice = _implementation(mlp, context, nested)
        except NoGate:
            continue
        except Miss as miss:
            context.experts.left.append(Left(place(node), f"a dense gated MLP, one expert: {miss}"))
            continue
        form = f"a dense MLP, SwiGLU, gate and up {'joined' if mlp.up is None else 'separate'}"
        context.experts.fused.append(Fused(place(node), choice.name, form, choice.why))
        _replace(graph, mlp, choice.name)


def _implementation(mlp: GatedMlp, context: PassContext, nested: bool) -> Choice:
    """The implementation that is to run it, or a Miss that says why none does."""
    x = value(mlp.x)
    assert x is not None
    out, inner = (int(size) for size in shape(mlp.down.weight))
    width = int(x.shape[-1])
    planned, machine = context.planned_experts, context.hardware
    case = Case(x.device, x.dtype, hidden=width, inner=inner, joined=mlp.up is None)
    if planned is not None and machine is not None:
        case = replace(case, planned_for=machine.capability, planned_on=machine.name)
    choice, reason = choose_dense(planned or context.options.experts, case)
    if reason is not None:
        raise Miss(reason)
    if nested:
        raise Miss("it stands in a graph of its own, as a checkpointed region is: its second product might run again")
    if any(bucket.quantized for bucket in context.buckets):
        raise Miss("the model has weights in MXFP8 or float8, whose products run one at a time")
    if mlp.gate_bias is not None or mlp.up_bias is not None or mlp.down.bias is not None or mlp.routing is not None:
        raise Miss("it has biases or a factor per token inside")
    if mlp.glu.interleave:
        raise Miss("columns of gate and up alternate")
    if mlp.glu != SWIGLU:
        raise Miss("its activation is not plain SwiGLU")
    if width != out:
        raise Miss(f"its input is {width} wide, its output {out}")
    weights = [node for node in (mlp.gate.weight, mlp.up_weight, mlp.down.weight) if node is not None]
    if mlp.inside.intersection(weights):
        raise Miss("one of its weights depends on what lies between the products")
    changed = changed_between([mlp.x, *weights], min(mlp.inside), mlp.down.node)
    if changed is not None:
        raise Miss(f"{changed.name} is changed in place inside")
    return choice


def _replace(graph: fx.Graph, mlp: GatedMlp, name: str) -> None:
    old = mlp.down.node
    with graph.inserting_before(old):
        new = graph.call_function(dense_mlp, (mlp.x, mlp.gate.weight, mlp.up_weight, mlp.down.weight, name))
    stand_in(new, old)
    new.meta["example_value"] = value(old)
    old.replace_all_uses_with(new)
    for node in sorted(mlp.inside, reverse=True):
        graph.erase_node(node)
