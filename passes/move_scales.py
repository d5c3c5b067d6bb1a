"""What a product with a wide result is scaled by goes to its narrow input; on CUDA, into the product that makes that.

Before autograd it comes last, for others look for products as the model wrote them. Provides ``linear(s · x, weight)``
in place of ``s · linear(x, weight)`` where the result has more columns than the input and ``s`` is a power of two, as
the scale of an adapter mostly is: the same bits, in forward and in every gradient. Left behind the product, backward
would write the whole gradient of the result a second time, scaled, for both of its products to read.

On the joint graph and on that of evaluation, after products are quantized: a product on CUDA that is scaled by a power
of two, and read by nothing else, does that itself (``alpha`` of ``addmm``), which takes no kernel.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from fxshard.passes.calls import call, dense_product, rewrite_nested, shape, stand_in, value
from fxshard.passes.context import PassContext
from fxshard.passes.matrix_products import inherit
from fxshard.schedule.aliases import is_view

_aten = torch.ops.aten

WIDE = (torch.float32, torch.bfloat16)
"""What has exponents to spare: in fp16 a scaled input might overflow where the scaled result did not."""


def move_scales(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    if any("example_value" in node.meta for node in module.graph.find_nodes(op="placeholder")):  # Dynamo's graph
        return rewrite_nested(module, _rewrite)
    for node in module.graph.find_nodes(op="call_function", target=_aten.mul.Tensor):
        product = _made_by(node)
        if product is not None:
            _join(module.graph, node, product)
    return module


def _rewrite(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        found = _scaled_product(node)
        if found is not None:
            _move(graph, node, *found)


def _scaled_product(node: fx.Node) -> tuple[fx.Node, float] | None:
    """The product that a node scales and nothing else reads, and by what."""
    if call(node) != "mul":
        return None
    scale: Any
    product, scale = node.args[:2] if isinstance(node.args[0], fx.Node) else reversed(node.args[:2])
    found = dense_product(product)
    if not _power_of_two(scale):
        return None
    if found is None or found.bias is not None or len(found.node.users) != 1:
        return None
    before, after, scaled = value(found.x), value(found.node), value(node)
    if before is None or after is None or scaled is None or not before.dtype == after.dtype == scaled.dtype:
        return None
    narrow, wide = shape(found.x)[-1], shape(found.node)[-1]
    fits = isinstance(narrow, int) and isinstance(wide, int) and narrow < wide and before.dtype in WIDE
    return (found.node, scale) if fits else None


def _power_of_two(scale: Any) -> bool:
    return isinstance(scale, int | float) and abs(math.frexp(scale)[0]) == 0.5


def _move(graph: fx.Graph, node: fx.Node, product: fx.Node, scale: float) -> None:
    x = product.args[0]
    assert isinstance(x, fx.Node)
    with graph.inserting_before(product):
        scaled = graph.call_function(operator.mul, (x, scale))
    stand_in(scaled, node)
    scaled.meta["example_value"] = value(x)
    product.update_arg(0, scaled)
    node.replace_all_uses_with(product)
    graph.erase_node(node)


def _made_by(node: fx.Node) -> fx.Node | None:
    """The product on CUDA that a node of ATen's scales, views of it in between, and that nothing else reads."""
    source, scale = node.args
    if not _power_of_two(scale):
        return None
    while isinstance(source, fx.Node) and len(source.users) == 1 and is_view(source):
        source = source.args[0]
    if not isinstance(source, fx.Node) or source.target is not _aten.mm.default or len(source.users) != 1:
        return None
    made, scaled = source.meta["val"], node.meta["val"]
    return source if made.device.type == "cuda" and made.dtype == scaled.dtype and made.dtype in WIDE else None


def _join(graph: fx.Graph, node: fx.Node, product: fx.Node) -> None:
    left, right = product.args
    assert isinstance(right, fx.Node)
    with graph.inserting_before(product):
        unread = graph.call_function(_aten.select.int, (right, 0, 0))  # addmm wants something to add nothing of
        joined = graph.call_function(_aten.addmm.default, (unread, left, right), {"beta": 0, "alpha": node.args[1]})
    for new in (unread, joined):
        inherit(new, product)
    unread.meta["val"], joined.meta["val"] = right.meta["val"].select(0, 0), product.meta["val"]
    product.replace_all_uses_with(joined)
    graph.erase_node(product)
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.erase_node(node)
