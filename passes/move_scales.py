"""Before autograd: what a product with a wide result is scaled by goes to its narrow input.

Requires nothing; it comes last, for others look for products as the model wrote them. Provides
``linear(s · x, weight)`` in place of ``s · linear(x, weight)`` where the result has more columns than the input and
``s`` is a power of two, as the scale of an adapter mostly is: the same bits, in forward and in every gradient. Left
behind the product, backward would write the whole gradient of the result a second time, scaled, for both of its
products to read.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from fxshard.passes.calls import call, dense_product, rewrite_nested, shape, stand_in, value
from fxshard.passes.context import PassContext

WIDE = (torch.float32, torch.bfloat16)
"""What has exponents to spare: in fp16 a scaled input might overflow where the scaled result did not."""


def move_scales(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return rewrite_nested(module, _rewrite)


def _rewrite(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        found = _scaled_product(node)
        if found is not None:
            _move(graph, node, *found)


def _scaled_product(node: fx.Node) -> tuple[fx.Node, float] | None:
    """The product that a node scales and nothing else reads, and by what."""
    if call(node) != "mul":
        return None
    product, scale = node.args[:2] if isinstance(node.args[0], fx.Node) else reversed(node.args[:2])
    found = dense_product(product)
    if not isinstance(scale, int | float) or abs(math.frexp(scale)[0]) != 0.5:
        return None
    if found is None or found.bias is not None or len(found.node.users) != 1:
        return None
    before, after, scaled = value(found.x), value(found.node), value(node)
    if before is None or after is None or scaled is None or not before.dtype == after.dtype == scaled.dtype:
        return None
    narrow, wide = shape(found.x)[-1], shape(found.node)[-1]
    fits = isinstance(narrow, int) and isinstance(wide, int) and narrow < wide and before.dtype in WIDE
    return (found.node, scale) if fits else None


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
