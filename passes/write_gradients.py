"""Backward: matrix products that are gradients are written straight into the gradient bucket.

Requires ``insert_reduce_scatter``. Replaces a matrix product whose only use is the copy into its place in the bucket by
one that writes there; likewise gradients of a head whose loss was computed in chunks, which backward only scales. Where
the bucket has a wider dtype this also saves the rounding in between (products on CUDA only: the CPU has none with
another output dtype; of MXFP8 and float8 products, which have it anyway, only the copy is saved). Everything else keeps
its copy, which the compiler fuses with what it can.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxshard.kernels.float8_ops import float8_mm, float8_mm_into
from fxshard.kernels.mxfp8_ops import mxfp8_mm, mxfp8_mm_into
from fxshard.kernels.ops import mm_into, scaled, scaled_into
from fxshard.passes.context import PassContext
from fxshard.schedule.events import event_of

_COPY = torch.ops.aten.copy_.default
_MM = torch.ops.aten.mm.default
_WRITTEN: dict[Any, Any] = {_MM: mm_into, mxfp8_mm: mxfp8_mm_into, float8_mm: float8_mm_into, scaled: scaled_into}
"""What computes a gradient, and what writes it into its place."""


def write_gradients(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    for copy in graph.find_nodes(op="call_function", target=_COPY):
        place, gradient = copy.args[0], copy.args[1]
        if not (_in_bucket(place) and isinstance(gradient, fx.Node) and gradient.target in _WRITTEN):
            continue
        if len(gradient.users) > 1 or not _right_after(gradient, copy) or not _writable(place, gradient):
            continue
        with graph.inserting_before(copy):
            if gradient.target is _MM:
                graph.call_function(mm_into, (*gradient.args, place))
            else:
                graph.call_function(_WRITTEN[gradient.target], (*gradient.args[:-1], place))  # instead of a dtype
        graph.erase_node(copy)
        graph.erase_node(gradient)
    return module


def _in_bucket(place: object) -> bool:
    if not isinstance(place, fx.Node) or place.target is not operator.getitem:
        return False
    source = place.args[0]
    return isinstance(source, fx.Node) and event_of(source) is not None


def _right_after(gradient: fx.Node, copy: fx.Node) -> bool:
    """A product is not moved: what it reads would live longer."""
    node = gradient.next
    while node.target is operator.getitem:
        node = node.next
    return node is copy


def _writable(place: fx.Node, gradient: fx.Node) -> bool:
    out, product = place.meta["val"], gradient.meta["val"]
    any_dtype = product.device.type == "cuda" or gradient.target is scaled
    return out.shape == product.shape and (out.dtype == product.dtype or any_dtype)
