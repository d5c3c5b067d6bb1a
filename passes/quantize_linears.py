"""Joint graph (and evaluation): matrix products of chosen linears run in MXFP8.

Requires parameters tied to inputs. Provides ``mxfp8_mm`` in place of every product with a chosen weight (forward and
input gradient) and of every product that is a chosen weight's gradient, on operands quantized along the dimension that
is summed over. An activation or an output gradient that is needed in both directions is read once; a weight is
quantized where it is used, rowwise by forward and columnwise by backward, so that neither has to be saved. Runs before
``recompute_param_views``, which marks the quantized weights too.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from fxshard.errors import PassError
from fxshard.passes.context import GRADS, PassContext, param_inputs
from fxshard.precision.mxfp8 import COLUMNWISE, ROWWISE
from fxshard.precision.ops import mxfp8_mm, mxfp8_quantize, mxfp8_quantize_both

_aten = torch.ops.aten
_MM, _ADDMM, _ADD = _aten.mm.default, _aten.addmm.default, _aten.add.Tensor
_SAME = (_aten.alias.default, _aten.detach.default)
_NOT_INHERITED = ("val", "tensor_meta", "original_aten", "fxshard_flops")


@dataclass(frozen=True)
class Operand:
    """A matrix that a product sums over ``axis`` of, however many transposes stand in between."""

    base: fx.Node
    axis: int


@dataclass(frozen=True)
class Product:
    node: fx.Node
    left: Operand
    right: Operand
    bias: fx.Node | None


def quantize_linears(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    weights = {node for node, ref in param_inputs(graph).items() if context.bucket(ref).quantized}
    if not weights:
        return module
    products = [product for node in graph.nodes if (product := _product(node)) is not None]
    gradients = _gradient_products(graph, context)
    chosen = [p for p in products if {p.left.base, p.right.base} & weights or p.node in gradients]
    _check_uses(weights, chosen, context)
    axes: dict[fx.Node, set[int]] = {}
    for product in chosen:
        for operand in (product.left, product.right):
            axes.setdefault(operand.base, set()).add(operand.axis)
    copies: dict[Operand, tuple[fx.Node, fx.Node]] = {}
    for product in chosen:
        for operand in (product.left, product.right):
            if operand not in copies:
                both = operand.base not in weights and len(axes[operand.base]) == 2
                copies.update(_quantize(graph, operand, both, product.node))
        _replace(graph, product, copies)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module


def _product(node: fx.Node) -> Product | None:
    if node.target is _MM:
        left, right = node.args
        bias = None
    elif node.target is _ADDMM and not node.kwargs:
        bias, left, right = node.args
    else:
        return None
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    assert bias is None or isinstance(bias, fx.Node)
    (first, turned), (second, turned_too) = _untransposed(left), _untransposed(right)
    return Product(
        node,
        Operand(first, COLUMNWISE if turned else ROWWISE),
        Operand(second, ROWWISE if turned_too else COLUMNWISE),
        bias,
    )


def _untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """(the matrix behind a chain of transposes, whether it is turned)."""
    turned = False
    while True:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return node, turned
        if _transposes(node):
            turned = not turned
        elif node.target not in _SAME:
            return node, turned
        node = source


def _transposes(node: fx.Node) -> bool:
    if node.target is _aten.t.default:
        return True
    if node.target is _aten.permute.default:
        return list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return node.target is _aten.transpose.int and {int(d) % 2 for d in node.args[1:3]} == {0, 1}  # type: ignore[arg-type]


def _gradient_products(graph: fx.Graph, context: PassContext) -> set[fx.Node]:
    """Products that are, or add up to, the gradient of a chosen weight."""
    output = graph.output_node()
    refs = output.meta.get(GRADS, ())
    returned = output.args[0]
    assert isinstance(returned, (tuple, list))
    stack = [
        node
        for ref, node in zip(refs, returned, strict=False)
        if ref is not None and isinstance(node, fx.Node) and context.bucket(ref).quantized
    ]
    found: set[fx.Node] = set()
    while stack:
        node, _ = _untransposed(stack.pop())
        if node.target is _MM:
            found.add(node)
        elif node.target is _ADD:
            stack += node.all_input_nodes
    return found


def _check_uses(weights: set[fx.Node], chosen: list[Product], context: PassContext) -> None:
    """Every use of a chosen weight must be a product that was recognised."""
    recognised = {product.node for product in chosen}
    for weight in weights:
        stack = list(weight.users)
        while stack:
            user = stack.pop()
            if user.op == "output" or user in recognised:
                continue
            if _transposes(user) or user.target in _SAME:
                stack += user.users
                continue
            ref = param_inputs(weight.graph)[weight]
            name = context.bucket(ref).params[ref.position]
            raise PassError(
                f"{name!r} is to run in MXFP8, but the {context.phase} graph also uses it in {user.target}: "
                f"add its linear to MXFP8(exclude=(..., {name.removesuffix('.weight')!r}))"
            )


def _quantize(graph: fx.Graph, operand: Operand, both: bool, user: fx.Node) -> dict[Operand, tuple[fx.Node, fx.Node]]:
    """Quantize a matrix before its first use, in one direction or in both."""
    args = (operand.base,) if both else (operand.base, operand.axis)
    target = mxfp8_quantize_both if both else mxfp8_quantize
    with graph.inserting_before(user):
        node = graph.call_function(target, args)
        _inherit(node, user)
        node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
        parts = []
        for i, value in enumerate(node.meta["val"]):
            part = graph.call_function(operator.getitem, (node, i))
            _inherit(part, user)
            part.meta["val"] = value
            parts.append(part)
    if not both:
        return {operand: (parts[0], parts[1])}
    base = operand.base
    return {Operand(base, ROWWISE): (parts[0], parts[1]), Operand(base, COLUMNWISE): (parts[2], parts[3])}


def _replace(graph: fx.Graph, product: Product, copies: dict[Operand, tuple[fx.Node, fx.Node]]) -> None:
    old, left, right = product.node, product.left, product.right
    value = old.meta["val"]
    with graph.inserting_before(old):
        new = graph.call_function(mxfp8_mm, (*copies[left], *copies[right], left.axis, right.axis, value.dtype))
        _inherit(new, old)
        new.meta["val"] = value
        if product.bias is not None:
            new = graph.call_function(_ADD, (new, product.bias))
            _inherit(new, old)
            new.meta["val"] = value
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _inherit(node: fx.Node, user: fx.Node) -> None:
    """Take over what the partitioner knows of a node: its phase, and whether it is recomputed."""
    node.meta.update({key: value for key, value in user.meta.items() if key not in _NOT_INHERITED})
