"""The matrix products of a joint graph, in all forms: dense, grouped by expert, and gradients of grouped ones.

Shared by the passes that decide which of them run in MXFP8. Transposes between a product and what it multiplies are
looked through: what counts is along which dimension of the untransposed matrix a product sums.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxshard.kernels.mxfp8 import COLUMNWISE, ROWWISE
from fxshard.kernels.op import grouped_product, grouped_wgrad
from fxshard.planner.cost import FLOPS, TRAFFIC
from fxshard.schedule.params import PARAM

_aten = torch.ops.aten
MM, ADDMM, GROUPED_MM = _aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default
_SAME = (_aten.alias.default, _aten.detach.default)
_STACKS, _CAT = _aten.stack.default, _aten.cat.default
_LAYS = (_aten.view.default, _aten.reshape.default)
_TAKES = (_aten.unbind.int, _aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, operator.getitem)


_OWN = ("val", "tensor_meta", "original_aten", "eager_input_vals", FLOPS, TRAFFIC)
"""What of a node's ``meta`` is about what it computes, and not about where it stands."""


@dataclass(frozen=True)
class Operand:
    """A matrix (or a stack of them) that a product sums over ``axis`` of."""

    base: fx.Node
    axis: int
    offsets: fx.Node | None = None
    """Where each expert's rows end, if it is rows that are summed over, expert by expert."""


@dataclass(frozen=True)
class Product:
    """``offsets``: a grouped one, of tokens and a stack of weights, or of tokens and tokens."""

    node: fx.Node
    left: Operand
    right: Operand
    bias: fx.Node | None = None
    offsets: fx.Node | None = None


def product_of(node: fx.Node) -> Product | None:
    """The product that a node is, or None."""
    args = [arg if isinstance(arg, fx.Node) else None for arg in node.args]
    if node.target is MM or (node.target is ADDMM and not node.kwargs):
        *bias, left, right = args
        assert left is not None and right is not None
        (first, turned), (second, turned_too) = untransposed(left), untransposed(right)
        left_axis, right_axis = COLUMNWISE if turned else ROWWISE, ROWWISE if turned_too else COLUMNWISE
        return Product(node, Operand(first, left_axis), Operand(second, right_axis), bias[0] if bias else None)
    if node.target not in (grouped_product, grouped_wgrad, GROUPED_MM):
        return None
    left, right = args[:2]
    offsets = args[2] if len(args) > 2 else node.kwargs.get("offs")
    if left is None or right is None or not isinstance(offsets, fx.Node):
        return None
    if node.target is GROUPED_MM and right.meta["val"].ndim == 2:  # tokens and tokens, the first of them turned
        left, turned = untransposed(left)
        return _of_tokens(node, left, right, offsets) if turned else None
    if node.target is grouped_wgrad:
        return _of_tokens(node, left, right, offsets)
    base, turned = untransposed(right)
    weights = Operand(base, ROWWISE if turned else COLUMNWISE)
    return Product(node, Operand(left, ROWWISE), weights, offsets=offsets)


def _of_tokens(node: fx.Node, left: fx.Node, right: fx.Node, offsets: fx.Node) -> Product:
    a, b = (Operand(each, COLUMNWISE, offsets) for each in (left, right))
    return Product(node, a, b, offsets=offsets)


def inherit(node: fx.Node, place: fx.Node) -> None:
    """Take over what the partitioner knows of a place: its phase, and whether it is recomputed."""
    node.meta.update({key: value for key, value in place.meta.items() if key not in _OWN})


def call_at(place: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Call an operator, where the graph inserts nodes just now, that inherits from ``place``; with what it gives."""
    made = place.graph.call_function(target, args, kwargs)
    inherit(made, place)
    made.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]), **kwargs)
    return made


def unpacked_at(place: fx.Node, target: Callable[..., Any], *args: Any) -> list[fx.Node]:
    """The same with an operator that returns a tuple; its elements."""
    node = call_at(place, target, *args)
    return [call_at(place, operator.getitem, node, i) for i in range(len(node.meta["val"]))]


def untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """(the matrix, or stack of matrices, that a chain of transposes starts from; whether the chain transposes it)."""
    turned = False
    while True:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return node, turned
        if transposes(node):
            turned = not turned
        elif node.target not in _SAME:
            return node, turned
        node = source


def transposes(node: fx.Node) -> bool:
    """Whether a node turns a matrix, or every matrix of a stack."""
    if node.target is _aten.t.default:
        return True
    if node.target is _aten.permute.default:
        return list(node.args[1]) in ([1, 0], [0, 2, 1])  # type: ignore[arg-type]
    if node.target is not _aten.transpose.int:
        return False
    ndim = node.meta["val"].ndim
    return {int(d) % ndim for d in node.args[1:3]} == {ndim - 2, ndim - 1}  # type: ignore[arg-type]


def passes_on(node: fx.Node) -> bool:
    """Whether a node gives its input on as it is, or turned."""
    return transposes(node) or node.target in _SAME


def stacked(node: fx.Node) -> list[fx.Node]:
    """The parameters, a matrix per expert, that a node stacks; none if it is no such stack."""
    source = node.args[0] if node.target in _LAYS else node  # a view of them one below the other, for Inductor
    if not isinstance(source, fx.Node) or source.target is not (_STACKS if source is node else _CAT):
        return []
    members: list[fx.Node] = list(source.args[0])  # type: ignore[arg-type]
    if (source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", 0)) != 0:
        return []
    if any(each.meta.get(PARAM) is None for each in members):
        return []
    shapes = {tuple(each.meta["val"].shape) for each in members}
    return members if len(shapes) == 1 and tuple(node.meta["val"].shape) == (len(members), *min(shapes)) else []


def gradient_products(node: fx.Node) -> list[fx.Node]:
    """The products that are, or add up to, a gradient; of a stack's gradient it may be one member."""
    found, stack = [], [node]
    while stack:
        node, _ = untransposed(stack.pop())
        if node.target is _aten.add.Tensor:
            stack += node.all_input_nodes
        elif node.target in _TAKES or node.target in _LAYS:
            stack += node.all_input_nodes[:1]
        elif product_of(node) is not None:
            found.append(node)
    return found
