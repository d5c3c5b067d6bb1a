"""MXFP8 in a joint graph: the nodes that quantize an operand of a product, and the product."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from fxshard.kernels.mxfp8 import COLUMNWISE, ROWWISE
from fxshard.kernels.mxfp8_grouped import mxfp8_grouped_mm, mxfp8_grouped_wgrad, mxfp8_quantize_groups, mxfp8_stack
from fxshard.kernels.mxfp8_ops import mxfp8_mm, mxfp8_quantize, mxfp8_quantize_both
from fxshard.passes.matrix_products import Operand, Product, stacked, unpacked_at

Copy = tuple[fx.Node, fx.Node]
"""Payload and scales."""


class Mxfp8Nodes:
    """Writes products in MXFP8. ``both``: what products sum over in both directions, and is quantized for both."""

    def __init__(self, graph: fx.Graph, both: Collection[fx.Node]) -> None:
        self._graph = graph
        self._both = both

    def replaces(self, product: Product, gradient: bool) -> bool:
        """Whether a chosen product runs in MXFP8: all do."""
        return True

    def prepared(self, product: Product) -> Product:
        """Operands of linears and experts are quantized alike."""
        return product

    def quantize(self, operand: Operand, value: fx.Node, user: fx.Node) -> dict[Operand, Copy]:
        """Quantize a matrix before its first use, in one direction or in both."""
        graph, base, axis = self._graph, operand.base, operand.axis
        members = stacked(value)
        with graph.inserting_before(user):
            if base in self._both and operand.offsets is None:
                first, second, third, fourth = unpacked_at(user, mxfp8_quantize_both, value)
                return {Operand(base, ROWWISE): (first, second), Operand(base, COLUMNWISE): (third, fourth)}
            if operand.offsets is not None:
                data, scales = unpacked_at(user, mxfp8_quantize_groups, value, operand.offsets)
            elif members:  # each for itself: where they rest quantized, the stack is one of copies
                parts = [unpacked_at(user, mxfp8_quantize, each, axis) for each in members]
                stack_of = ([part[0] for part in parts], [part[1] for part in parts])
                data, scales = unpacked_at(user, mxfp8_stack, *stack_of)
            else:
                data, scales = unpacked_at(user, mxfp8_quantize, value, axis)
        return {operand: (data, scales)}

    def multiply(self, product: Product, copies: dict[Operand, Copy], dtype: torch.dtype) -> fx.Node:
        """The product of quantized operands, before the one that it takes the place of."""
        left, right = product.left, product.right
        operands = (*copies[left], *copies[right])
        with self._graph.inserting_before(product.node):
            if product.offsets is None:
                return self._graph.call_function(mxfp8_mm, (*operands, left.axis, right.axis, dtype))
            if right.offsets is None:
                return self._graph.call_function(mxfp8_grouped_mm, (*operands, product.offsets, right.axis, dtype))
            return self._graph.call_function(mxfp8_grouped_wgrad, (*operands, product.offsets, dtype))
