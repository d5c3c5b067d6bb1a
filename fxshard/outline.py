"""Outlines of graphs: what goes in and what comes out.

AOTAutograd asks for a forward and a backward graph and looks at their inputs and outputs, to know what it passes from
one to the other. Where both are scheduled before it is asked, it is shown no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from fxshard import _compat

SHOWN = ("val", "desc", "saved_tensor_with_no_vc_check")
"""What AOTAutograd reads of inputs and outputs."""


def outlined() -> NoReturn:
    """Stands for whatever computes an output."""
    raise RuntimeError("this graph is the outline of one that is compiled elsewhere: it computes nothing")


def outline(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with nothing between its inputs and its outputs."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        env[node] = _shown(graph.create_node("placeholder", node.target, node.args, name=node.name), node)
    end = module.graph.output_node()
    for node in end.all_input_nodes:
        if node not in env:
            env[node] = _shown(graph.create_node("call_function", outlined, name=node.name), node)
    _shown(graph.output(fx.map_arg(end.args[0], env.__getitem__)), end)
    return _compat.graph_module(torch.nn.Module(), graph)


def _shown(copy: fx.Node, node: fx.Node) -> fx.Node:
    copy.meta.update({key: node.meta[key] for key in SHOWN if key in node.meta})
    return copy


def fits(forward: fx.GraphModule, backward: fx.GraphModule, traced: fx.GraphModule, outputs: int) -> bool:
    """Whether AOTAutograd, which has ``traced`` something with the same inputs and outputs, can call the two graphs.

    Forward takes what it has for primals and begins with what it has for results; backward ends with a gradient for
    each primal, if there is one, and takes its tangents last.
    """
    inputs = traced.graph.find_nodes(op="placeholder")
    found = traced.graph.output_node().args[0]
    primals = forward.graph.find_nodes(op="placeholder")
    taken = backward.graph.find_nodes(op="placeholder")
    results, gradients = (module.graph.output_node().args[0] for module in (forward, backward))
    assert isinstance(found, Sequence) and isinstance(results, Sequence) and isinstance(gradients, Sequence)
    tangents = inputs[len(primals) :]
    return (
        len(found) == outputs + len(gradients)
        and len(gradients) == len(primals)
        and len(results) >= outputs
        and len(taken) == len(results) - outputs + len(tangents)
        and all(map(same_kind, primals, inputs))
        and all(map(same_kind, results[:outputs], found[:outputs]))
        and all(map(same_kind, taken[len(taken) - len(tangents) :], tangents))
    )


def same_kind(a: Any, b: Any) -> bool:
    """Whether two nodes have values that cannot be told apart by shape, strides, dtype and device."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return a is None and b is None
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y)
    return (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
