"""Before autograd: a loop over expert modules becomes grouped products, and grouped products can be differentiated.

Requires nothing. Provides ``fxshard::grouped_product`` in the place of products whose own backward cannot be traced
(the fallback of transformers reads offsets on the host there), and in the place of gated MLPs that each compute a part
of one tensor, in order, and are put together again. The weights of such a loop are stacked: a copy, made again in
backward. What fills rows that no expert takes is left out where every row has one (``sentinels``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxshard.kernels.glu import SWIGLU
from fxshard.kernels.op import grouped_product as grouped_product_op
from fxshard.kernels.report import Left
from fxshard.passes.calls import (
    argument,
    call,
    changed_between,
    dense_product,
    grouped_products,
    place,
    rewrite_nested,
    shape,
    stand_in,
    switched_between,
    value,
)
from fxshard.passes.context import PassContext
from fxshard.passes.match_glu import GatedMlp, Miss, NoGate, match_gated_mlp
from fxshard.passes.sentinels import drop_sentinels


def group_experts(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return rewrite_nested(module, lambda graph: _group(graph, context))


def _group(graph: fx.Graph, context: PassContext) -> None:
    drop_sentinels(graph)
    for found in list(grouped_products(graph)):
        if str(found.node.target).startswith("transformers."):
            with graph.inserting_before(found.node):
                _substitute(found.node, _product(graph, found.x, found.weight, found.offsets, found.node))
    for node in list(graph.nodes):
        if call(node) in ("cat", "stack") and isinstance(node.args[0], (list, tuple)) and len(node.args[0]) > 1:
            try:
                _group_loop(graph, node)
            except Miss as miss:
                if str(miss):
                    context.experts.left.append(Left(place(node), f"a loop over gated MLPs, but {miss}"))


def _product(graph: fx.Graph, x: Any, weight: Any, offsets: Any, like: fx.Node) -> fx.Node:
    node = graph.call_function(grouped_product_op, (x, weight, offsets, "torch"))
    node.meta.update(like.meta)
    return node


def _substitute(old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


# -- loops -----------------------------------------------------------------------------------------------------------


def _group_loop(graph: fx.Graph, together: fx.Node) -> None:
    """Replace ``cat([expert(part) for expert, part in zip(experts, parts)])``. An empty Miss: this is no such loop."""
    mlps = _experts(together)
    if argument(together, 1, "dim", 0) != 0:
        raise Miss("their results are put together along another dimension than the first")
    first = mlps[0]
    for mlp in mlps[1:]:
        if _signature(mlp) != _signature(first):
            raise Miss("they differ in shape or activation")
    if any(_extras(first)):
        raise Miss("they have biases or routing weights inside")
    if first.glu != SWIGLU:
        raise Miss("their activation is not plain SwiGLU")
    source = _parts([mlp.x for mlp in mlps])
    weights = [w for mlp in mlps for w in (mlp.gate.weight, mlp.up_weight, mlp.down.weight) if w is not None]
    changed = changed_between([source, *weights], min(min(mlp.inside) for mlp in mlps), together)
    if changed is not None:
        raise Miss(f"{changed.name} is changed in place between them")
    if switched_between(min(mlp.x for mlp in mlps), together):
        raise Miss("gradients or autocast are switched on or off between them")
    *leading, hidden = shape(first.x)
    rows, experts = math.prod(map(int, leading)), len(mlps)

    def made(node: fx.Node, result: torch.Tensor) -> fx.Node:
        stand_in(node, together)
        node.meta["example_value"] = result
        return node

    like = value(first.x)
    assert like is not None
    with graph.inserting_before(together):
        x = made(graph.call_method("reshape", (source, -1, hidden)), like.new_empty(experts * rows, hidden))
        ends = [rows * (expert + 1) for expert in range(experts)]
        offsets = made(
            graph.call_function(torch.tensor, (ends,), {"device": like.device, "dtype": torch.int32}),
            like.new_empty(experts, dtype=torch.int32),
        )

        def product(x: fx.Node, weights: Sequence[fx.Node]) -> fx.Node:
            out, width = (int(size) for size in shape(weights[0]))
            stacked = made(graph.call_function(torch.stack, (list(weights),)), like.new_empty(experts, out, width))
            turned = made(
                graph.call_method("transpose", (stacked, 1, 2)), like.new_empty(experts, out, width).transpose(1, 2)
            )
            node = graph.call_function(grouped_product_op, (x, turned, offsets, "torch"))
            return made(node, like.new_empty(experts * rows, out))

        hidden_node = _activation(graph, first, mlps, x, product, made)
        out = product(hidden_node, [mlp.down.weight for mlp in mlps])
        whole = value(together)
        assert whole is not None
        result = made(graph.call_method("reshape", (out, *whole.shape)), whole)
    together.replace_all_uses_with(result)
    for node in sorted({together}.union(*(mlp.inside for mlp in mlps)), reverse=True):
        graph.erase_node(node)


def _activation(graph: fx.Graph, first: GatedMlp, mlps: list[GatedMlp], x: fx.Node, product: Any, made: Any) -> fx.Node:
    """First products and the activation, written the way ``fuse_grouped_swiglu`` takes apart again."""
    gate = product(x, [mlp.gate.weight for mlp in mlps])
    if first.up is None:
        halves = graph.call_method("chunk", (gate, 2, -1))
        whole = value(gate)
        assert whole is not None
        gate, up = (
            made(graph.call_function(operator.getitem, (halves, i)), half) for i, half in enumerate(whole.chunk(2, -1))
        )
    else:
        up = product(x, [mlp.up.weight for mlp in mlps if mlp.up is not None])
    silu = made(graph.call_function(torch.nn.functional.silu, (gate,)), value(gate))
    return made(graph.call_function(torch.mul, (silu, up)), value(gate))


def _experts(together: fx.Node) -> list[GatedMlp]:
    results = together.args[0]
    assert isinstance(results, (list, tuple))
    mlps: list[GatedMlp] = []
    for result in results:
        down = dense_product(result)
        if down is None or set(down.node.users) != {together}:
            raise Miss("")
        try:
            mlps.append(match_gated_mlp(down, dense_product))
        except NoGate as miss:
            raise Miss("") from miss
    if len(set(results)) != len(results):
        raise Miss("one result is used twice")
    return mlps


def _signature(mlp: GatedMlp) -> tuple[Any, ...]:
    weights = (mlp.gate.weight, mlp.up_weight, mlp.down.weight)
    return shape(mlp.x), *map(shape, weights), mlp.glu, _extras(mlp)


def _extras(mlp: GatedMlp) -> tuple[bool, ...]:
    """Which biases and routing weights there are."""
    return tuple(extra is not None for extra in (mlp.gate_bias, mlp.up_bias, mlp.down.bias, mlp.routing))


def _parts(inputs: list[fx.Node]) -> fx.Node:
    """The tensor of whose first dimension the inputs are the parts, all of them, in order."""
    if any(call(node) != "index" for node in inputs):
        raise Miss("their inputs are not consecutive parts of one tensor")
    sources = {node.args[0] for node in inputs}
    source = next(iter(sources))
    if len(sources) != 1 or [node.args[1] for node in inputs] != list(range(len(inputs))):
        raise Miss("their inputs are not consecutive parts of one tensor")
    assert isinstance(source, fx.Node)
    whole: Any = source
    if call(source) in ("chunk", "split", "unbind"):
        whole = source.args[0]
        dim = argument(source, 1 if call(source) == "unbind" else 2, "dim", 0)
        if dim != 0:
            raise Miss("their inputs are parts of another dimension than the first")
    size = value(whole)
    part = value(inputs[0])
    if size is None or part is None or size.numel() != part.numel() * len(inputs):
        raise Miss("their inputs are not all of one tensor")
    return whole
