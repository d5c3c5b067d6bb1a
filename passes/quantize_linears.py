"""Joint graph (and evaluation): matrix products with chosen weights, of linears and of experts, run in MXFP8.

Requires parameters tied to inputs, and ``open_experts``. Provides ``mxfp8_mm`` or ``mxfp8_grouped_mm`` in place of
every product with a chosen weight (forward and input gradient) and ``mxfp8_mm`` or ``mxfp8_grouped_wgrad`` in place of
every product that is a chosen weight's gradient, on operands quantized along the dimension that is summed over. An
activation or an output gradient that is needed in both directions is read once; a weight is quantized where it is used,
rowwise by forward and columnwise by backward, so that neither has to be saved. A product that is a gradient as it is
has the dtype in which gradients are reduced. Runs before ``recompute_param_views``, which marks the quantized weights.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxshard._torch.errors import PassError
from fxshard.kernels.mxfp8 import COLUMNWISE, ROWWISE
from fxshard.kernels.mxfp8_grouped_ops import mxfp8_grouped_mm, mxfp8_grouped_wgrad, mxfp8_quantize_groups, mxfp8_stack
from fxshard.kernels.mxfp8_ops import mxfp8_mm, mxfp8_quantize, mxfp8_quantize_both
from fxshard.passes.context import PassContext
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
from fxshard.schedule.params import GRADS, ParamRef, param_inputs

_ADD = torch.ops.aten.add.Tensor

Copy = tuple[fx.Node, fx.Node]
"""Payload and scales."""


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
    axes: dict[fx.Node, set[int]] = {}
    for product in (product for product in chosen if product.offsets is None):
        for operand in (product.left, product.right):
            axes.setdefault(operand.base, set()).add(operand.axis)
    copies: dict[Operand, Copy] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    for product in chosen:
        for operand in (product.left, product.right):
            if operand not in copies:
                both = operand.base not in weights and len(axes.get(operand.base, ())) == 2
                value = replaced.get(operand.base, operand.base)  # which may be one of these products itself
                copies.update(_quantize(graph, operand, value, both and operand.offsets is None, product.node))
        replaced[product.node] = _replace(graph, product, copies, wide.get(product.node))
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
            if user.op == "output" or user in recognised:
                continue
            if passes_on(user):
                stack += user.users
                continue
            ref = param_inputs(weight.graph)[weight]
            name = context.bucket(ref).params[ref.position]
            raise PassError(
                f"{name!r} is to run in MXFP8, but the {context.phase} graph also uses it in {user.target}: "
                f"add it to MXFP8(exclude=(..., {name.removesuffix('.weight')!r}))"
            )


def _quantize(graph: fx.Graph, operand: Operand, value: fx.Node, both: bool, user: fx.Node) -> dict[Operand, Copy]:
    """Quantize a matrix before its first use, in one direction or in both."""
    base, axis = operand.base, operand.axis
    members = stacked(value)
    with graph.inserting_before(user):
        if both:
            first, second, third, fourth = _unpacked(graph, mxfp8_quantize_both, (value,), user)
            return {Operand(base, ROWWISE): (first, second), Operand(base, COLUMNWISE): (third, fourth)}
        if operand.offsets is not None:
            data, scales = _unpacked(graph, mxfp8_quantize_groups, (value, operand.offsets), user)
        elif members:  # each for itself: where they rest quantized, the stack is one of copies
            parts = [_unpacked(graph, mxfp8_quantize, (each, axis), user) for each in members]
            stack_of = ([part[0] for part in parts], [part[1] for part in parts])
            data, scales = _unpacked(graph, mxfp8_stack, stack_of, user)
        else:
            data, scales = _unpacked(graph, mxfp8_quantize, (value, axis), user)
    return {operand: (data, scales)}


def _unpacked(graph: fx.Graph, target: Any, args: tuple[Any, ...], user: fx.Node) -> list[fx.Node]:
    node = graph.call_function(target, args)
    inherit(node, user)
    node.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
    parts = []
    for i, value in enumerate(node.meta["val"]):
        part = graph.call_function(operator.getitem, (node, i))
        inherit(part, user)
        part.meta["val"] = value
        parts.append(part)
    return parts


def _replace(graph: fx.Graph, product: Product, copies: dict[Operand, Copy], dtype: torch.dtype | None) -> fx.Node:
    old, left, right = product.node, product.left, product.right
    value = old.meta["val"] if dtype is None else old.meta["val"].to(dtype)
    operands = (*copies[left], *copies[right])
    with graph.inserting_before(old):
        if product.offsets is None:
            new = graph.call_function(mxfp8_mm, (*operands, left.axis, right.axis, value.dtype))
        elif right.offsets is None:
            new = graph.call_function(mxfp8_grouped_mm, (*operands, product.offsets, right.axis, value.dtype))
        else:
            new = graph.call_function(mxfp8_grouped_wgrad, (*operands, product.offsets, value.dtype))
        inherit(new, old)
        new.meta["val"] = value
        if product.bias is not None:
            new = graph.call_function(_ADD, (new, product.bias))
            inherit(new, old)
            new.meta["val"] = value
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    return new
