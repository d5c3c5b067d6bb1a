"""Joint graph: the gradient of a gather by a permutation is a gather by the inverse permutation.

Mixtures of experts sort their tokens by expert. Autograd differentiates ``x[order]`` as if an index could occur any
number of times: zeros, and every row added to the one that it came from. Where the indices are those of a sort, each
occurs once, and the gradient is the rows in the inverse order; of ``x[order // k]``, which gathers each row k times, it
is the sum of k neighbours in that order. Nothing is set to zero and nothing is added atomically: the sum is rounded
once, and is the same in every run. A compiler fuses the gather with what reads it.

Where the graph has the inverse, as ``inverse[order] = arange(n)`` or as the sort of the order, it is used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxshard._torch import private
from fxshard.passes.context import PassContext
from fxshard.passes.matrix_products import call_at

_aten = torch.ops.aten
_SORTS = {_aten.sort.default, _aten.sort.stable}
_ZEROS = {_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default}
_IOTA = torch.ops.prims.iota.default
_PUT = _aten.index_put.default


def gather_gradients(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    inverses: dict[fx.Node, fx.Node] = {}  # of permutations that the graph has computed before a node
    changed = False
    for node in list(graph.nodes):
        _note_inverse(node, inverses)
        found = _gathered(node)
        if found is None:
            continue
        order, times = found
        with graph.inserting_before(node):
            call = _caller(node)
            if order not in inverses:
                inverses[order] = _inverse_of(call, order)
            gradient = call(_aten.index.Tensor, node.args[2], [inverses[order]])
            if times > 1:
                shape = list(node.meta["val"].shape)
                gradient = call(_aten.view.default, gradient, [shape[0], times, *shape[1:]])
                gradient = call(_aten.sum.dim_IntList, gradient, [1])
        node.replace_all_uses_with(gradient)
        changed = True
    if changed:
        graph.eliminate_dead_code()
        module.recompile()
    return module


def _gathered(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(a permutation, how often it gathers each row) if the node adds rows up for a gather by that permutation."""
    if node.target is not _PUT or not _accumulates(node):
        return None
    args: tuple[Any, ...] = node.args
    zeros, indices, rows = args[:3]
    if not _is_zero(zeros) or len(indices) != 1:
        return None
    order, times = _divided(indices[0])
    if not _is_permutation(order):
        return None
    out, given, length = node.meta["val"], rows.meta["val"], order.meta["val"].shape[0]
    known = length and all(isinstance(size, int) for size in (length, *out.shape, *given.shape))
    if not known or out.shape[0] * times != length or given.shape != (length, *out.shape[1:]):
        return None
    return (order, times) if given.dtype == out.dtype and given.is_contiguous() else None


def _accumulates(node: fx.Node) -> bool:
    return bool(node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False))


def _is_zero(node: fx.Node) -> bool:
    return node.target in _ZEROS or (node.target is _aten.full.default and node.args[1] in (0, 0.0))


def _counts(node: Any, length: int) -> bool:
    """Whether a node is ``arange(length)``, as it is written or as Inductor decomposes it."""
    if not isinstance(node, fx.Node) or node.args != (length,):
        return False
    from_zero = (node.kwargs.get("start"), node.kwargs.get("step")) == (0, 1)
    return node.target is _aten.arange.default or (node.target is _IOTA and from_zero)


def _divided(index: Any) -> tuple[Any, int]:
    """(an index, the whole number that it is divided by and rounded down)."""
    by: Any = 1
    if isinstance(index, fx.Node) and (
        index.target is _aten.floor_divide.default
        or (index.target is _aten.div.Tensor_mode and index.kwargs.get("rounding_mode") == "floor")
    ):
        index, by = index.args
    return index, by if isinstance(by, int) else 0


def _is_permutation(node: Any) -> bool:
    """Whether a node has each number from zero up to its length once, as a sort of a vector and its inverse do."""
    return _sorted_by(node) is not None or _inverted(node) is not None


def _sorted_by(node: Any) -> fx.Node | None:
    """The vector that is sorted, if the node is where a sort takes its elements from."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem:
        return None
    args: tuple[Any, ...] = node.args
    sort, which = args
    vector: fx.Node | None = sort.args[0] if sort.target in _SORTS and which == 1 else None
    return vector if vector is not None and vector.meta["val"].ndim == 1 else None


def _inverted(node: Any) -> fx.Node | None:
    """The permutation whose inverse is written as ``inverse[order] = arange(n)``."""
    if not isinstance(node, fx.Node) or node.target is not _PUT or _accumulates(node):
        return None
    args: tuple[Any, ...] = node.args
    (order, *others), numbers = args[1:3]
    if others or _sorted_by(order) is None:
        return None
    shape = node.meta["val"].shape
    return order if order.meta["val"].shape == shape and _counts(numbers, shape[0]) else None


def _note_inverse(node: fx.Node, inverses: dict[fx.Node, fx.Node]) -> None:
    """If the node is the inverse of a permutation, note each as the other's."""
    order = _inverted(node) or _sorted_by(node)
    if order is not None and _is_permutation(order):
        inverses.setdefault(order, node)
        inverses.setdefault(node, order)


def _caller(place: fx.Node) -> Callable[..., fx.Node]:
    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with private.as_fake_as(place.meta["val"]):
            return call_at(place, target, *args, **kwargs)

    return call


def _inverse_of(call: Callable[..., fx.Node], order: fx.Node) -> fx.Node:
    value = order.meta["val"]
    options = {"start": 0, "step": 1, "dtype": value.dtype, "device": value.device, "requires_grad": False}
    numbers = call(_IOTA, value.shape[0], **options)
    return call(_PUT, order, [order], numbers)  # every place is written: what was there does not matter
