"""Joint graph (and evaluation): fused experts whose weights are quantized become products and activation again.

Requires parameters tied to inputs. The fused operator multiplies in the dtype of its inputs. Where weights run in
MXFP8 it is replaced by what it consists of, ``fxshard::grouped_product`` and ``fxshard::glu``, so that
``quantize_linears`` finds each product; with bf16 weights the result is the same, bit by bit. Transformer Engine's
fused grouped MLP becomes its phases, on weights that the graph quantizes (``te_mlp_nodes``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from fxshard._torch.errors import ConfigError
from fxshard.kernels.choose import implementation
from fxshard.kernels.glu_op import add_expert_bias, expert_bias_dot, glu, glu_backward
from fxshard.kernels.op import grouped_product, grouped_swiglu, grouped_swiglu_backward
from fxshard.passes.context import PassContext
from fxshard.passes.matrix_products import call_at, stacked, untransposed
from fxshard.passes.te_mlp_nodes import open_te_mlp
from fxshard.schedule.params import param_inputs

_aten = torch.ops.aten


def open_experts(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    opened = open_te_mlp(graph, context)
    chosen = {node for node, ref in param_inputs(graph).items() if context.bucket(ref).quantized}
    if not chosen and not opened:
        return module
    # Backward first: it reads what forward returns besides its result.
    for target, written in ((grouped_swiglu_backward, _backward), (grouped_swiglu, _forward)):
        for node in graph.find_nodes(op="call_function", target=target):
            if any(_parameters_of(weight) & chosen for weight in node.args[2:5]):
                _check_opens(node.args[-1])
                _replace(graph, node, written)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module


def _check_opens(name: str) -> None:
    """One node is the whole backward of such an implementation: there is nothing in it to quantize."""
    if implementation(name).recomputes:
        raise ConfigError(
            f'experts="{name}" computes experts and their gradients as a whole, and precision= chooses their weights '
            'for quantized products: leave them out (experts=()), or use experts="auto"'
        )


def _parameters_of(weight: Any) -> set[fx.Node]:
    """The parameters that a weight is, or is stacked from."""
    if not isinstance(weight, fx.Node):
        return set()
    base, _ = untransposed(weight)
    return {base, *stacked(base)}


Call = Callable[..., fx.Node]
Results = tuple[fx.Node | None, ...]


def _replace(graph: fx.Graph, node: fx.Node, opened: Callable[[Call, tuple[Any, ...]], Results]) -> None:
    with graph.inserting_before(node):
        results = opened(partial(call_at, node), node.args)
    for part in list(node.users):
        result = results[part.args[1]]  # type: ignore[index]
        if result is not None:
            part.replace_all_uses_with(result)
        graph.erase_node(part)
    graph.erase_node(node)


def _forward(call: Call, args: tuple[Any, ...]) -> Results:
    x, offsets, gate, up, down, gate_bias, up_bias, down_bias, weights, *activation, weighted_bias, name = args

    def product(x: fx.Node, weight: fx.Node, bias: fx.Node | None, scale: fx.Node | None = None) -> fx.Node:
        result = call(grouped_product, x, weight, offsets, name)
        return result if bias is None else call(add_expert_bias, result, bias, offsets, scale)

    pre = product(x, gate, gate_bias)
    pre_up = product(x, up, up_bias) if up is not None else None
    hidden = call(glu, pre, pre_up, weights, *activation)
    return product(hidden, down, down_bias, weights if weighted_bias else None), pre, pre_up


def _backward(call: Call, args: tuple[Any, ...]) -> Results:
    grad, offsets, gate, up, down, down_bias, weights, pre, pre_up, *activation, weighted_bias, name = args

    def product(x: fx.Node, weight: fx.Node) -> fx.Node:
        return call(grouped_product, x, call(_aten.transpose.int, weight, -2, -1), offsets, name)

    grad_hidden = product(grad, down)
    found = call(glu_backward, pre, pre_up if up is not None else None, weights, grad_hidden, *activation)
    grad_pre, grad_up, hidden, grad_weights = (call(operator.getitem, found, i) for i in range(4))
    grad_x = product(grad_pre, gate)
    if up is not None:
        grad_x = call(_aten.add.Tensor, grad_x, product(grad_up, up))
    if down_bias is not None and weights is not None and weighted_bias:
        grad_weights = call(expert_bias_dot, grad_weights, grad, down_bias, offsets)
    return grad_x, grad_pre, grad_up, hidden, grad_weights
