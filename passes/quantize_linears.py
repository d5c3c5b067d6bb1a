"""Joint graph (and evaluation): matrix products with chosen weights, of linears and of experts, run in MXFP8 or float8.

Requires parameters tied to inputs, and ``open_experts``. Provides ``mxfp8_mm`` or ``mxfp8_grouped_mm`` in place of
every product with a chosen weight (forward and input gradient) and ``mxfp8_mm`` or ``mxfp8_grouped_wgrad`` in place of
every product that is a chosen weight's gradient, on operands quantized along the dimension that is summed over; in
float8 ``float8_mm`` in place of all of them, or ``float8_grouped_mm`` (weight gradients of experts stay bf16). An
activation or an output gradient that is needed in both directions is read once; a weight is quantized where it is used,
rowwise by forward and columnwise by backward, so that neither has to be saved. A product that is a gradient as it is
has the dtype in which gradients are reduced. Runs before ``recompute_param_views``, which marks the quantized weights.
``mxfp8_nodes`` and ``float8_nodes`` write the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fxshard._torch.errors import PassError
from fxshard.kernels.mxfp8 import ROWWISE
from fxshard.kernels.mxfp8_ops import mxfp8_quantize
from fxshard.passes.context import PassContext
from fxshard.passes.float8_nodes import Float8Nodes
from fxshard.passes.matrix_products import (
    Operand,
    Product,
    gradient_products,
    inherit,
    passes_on,
    product_of,
    stacked,
    untransposed,
)
from fxshard.passes.mxfp8_nodes import Copy, Mxfp8Nodes
from fxshard.planner.gather_modes import Float8Recipe
from fxshard.schedule.params import GRADS, ParamRef, param_inputs

_ADD = torch.ops.aten.add.Tensor


def quantize_linears(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    weights = {node for node, ref in param_inputs(graph).items() if context.bucket(ref).quantized}
    if not weights:
        return module
    wide = _straighten_gradients(graph, context)
    gradients = {product for _, node in _gradients(graph, context) for product in gradient_products(node)}
    products = [product for node in graph.nodes if (product := product_of(node)) is not None]
    chosen = [p for p in products if _multiplies(p, weights) or p.node in gradients]
    _check_uses(weights, chosen, context)
    recipe = next(plan.float8 for plan in context.buckets if plan.quantized)
    nodes = _nodes(graph, recipe, weights, chosen)
    copies: dict[Operand, Copy] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    for product in (nodes.prepared(each) for each in chosen if nodes.replaces(each, each.node in gradients)):
        for operand in (product.left, product.right):
            if operand not in copies:
                value = replaced.get(operand.base, operand.base)  # which may be one of these products itself
                copies.update(nodes.quantize(operand, value, product.node))
        dtype = wide.get(product.node, product.node.meta["val"].dtype)
        replaced[product.node] = _replace(product, nodes.multiply(product, copies, dtype), dtype)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module


def _multiplies(product: Product, weights: set[fx.Node]) -> bool:
    operands = (product.left.base, product.right.base)
    return any(base in weights or ((members := stacked(base)) and weights.issuperset(members)) for base in operands)


def _gradients(graph: fx.Graph, context: PassContext) -> Iterable[tuple[ParamRef, fx.Node]]:
    """The gradients of chosen weights."""
    output = graph.output_node()
    returned = output.args[0]
    assert isinstance(returned, (tuple, list))
    for ref, node in zip(output.meta.get(GRADS, ()), returned, strict=False):
        if ref is not None and isinstance(node, fx.Node) and context.bucket(ref).quantized:
            yield ref, node


def _straighten_gradients(graph: fx.Graph, context: PassContext) -> dict[fx.Node, torch.dtype]:
    """Return products themselves where they were transposed there and back; gives their dtypes as gradients.

    They are not rounded to bf16 on their way into a bucket of another dtype, whatever stands between them.
    """
    dtypes: dict[fx.Node, torch.dtype] = {}
    straight: dict[fx.Node, fx.Node] = {}
    output = graph.output_node()
    for ref, node in _gradients(graph, context):
        base, turned = untransposed(node)
        product, bucket = product_of(base), context.bucket(ref)
        if not turned and bucket.trainable and product is not None and product.bias is None:
            straight[node], dtypes[base] = base, bucket.reduce_dtype
    output.args = fx.map_arg(output.args, lambda node: straight.get(node, node))
    graph.eliminate_dead_code()  # the transposes
    return {base: dtype for base, dtype in dtypes.items() if set(base.users) == {output}}


def _check_uses(weights: set[fx.Node], chosen: list[Product], context: PassContext) -> None:
    """Every use of a chosen weight must be a product that was recognised."""
    recognised = {product.node for product in chosen}
    for product in chosen:
        if stacked(product.right.base):
            recognised |= {product.right.base, *product.right.base.all_input_nodes}
    for weight in weights:
        stack = list(weight.users)
        while stack:
            user = stack.pop()
            if user.op == "output" or user in recognised or user.target is mxfp8_quantize:
                continue  # the last are those of Transformer Engine's experts
            if passes_on(user):
                stack += user.users
                continue
            ref = param_inputs(weight.graph)[weight]
            name = context.bucket(ref).params[ref.position]
            policy = "MXFP8" if context.bucket(ref).float8 is None else "Float8"
            raise PassError(
                f"{name!r} is to run in {policy}, but the {context.phase} graph also uses it in {user.target}: "
                f"add it to {policy}(exclude=(..., {name.removesuffix('.weight')!r}))"
            )


def _nodes(
    graph: fx.Graph, recipe: Float8Recipe | None, weights: set[fx.Node], chosen: list[Product]
) -> Mxfp8Nodes | Float8Nodes:
    """What writes the nodes of the products."""
    axes: dict[fx.Node, set[int]] = {}
    for product in (product for product in chosen if product.offsets is None):
        for operand in (product.left, product.right):
            axes.setdefault(operand.base, set()).add(operand.axis)
    both = {base for base, summed in axes.items() if len(summed) == 2 and base not in weights}
    if recipe is None:
        return Mxfp8Nodes(graph, both)
    # What a weight's rows are multiplied with is an activation; all else that is multiplied is an output's gradient.
    pairs = [(product.left, product.right) for product in chosen]
    activations = {a.base for pair in pairs for a, b in (pair, pair[::-1]) if b.base in weights and b.axis == ROWWISE}
    gradients = axes.keys() - activations - weights
    return Float8Nodes(graph, recipe, weights, both if recipe.quantized_wgrad else (), gradients)


def _replace(product: Product, new: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Let ``new``, which stands before it, take the place of a product."""
    old = product.node
    inherit(new, old)
    new.meta["val"] = value = old.meta["val"].to(dtype)
    if product.bias is not None:
        with old.graph.inserting_before(old):
            new = old.graph.call_function(_ADD, (new, product.bias))
        inherit(new, old)
        new.meta["val"] = value
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
    return new
