"""Float8 in a joint graph: the nodes that quantize an operand of a product, and the product.

Largest magnitudes, scales and casts that stay in place are plain nodes, which a compiler fuses into the kernel that
produces the value. Inside of a kernel it does not round values to bf16; what is measured and cast is therefore read as
the bits that memory would hold, so that results do not depend on what is fused. What a product sums over has to lie
along its operands: transposed copies are made by an operator that reads a value once for both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxshard._torch.errors import PassError
from fxshard.kernels.float8 import (
    BLOCK,
    COLUMNWISE,
    E4M3,
    EXPONENT,
    EXPONENT_BITS,
    LARGEST,
    ROUND_UP,
    ROWWISE,
    TWICE_ONE,
    Scaling,
)
from fxshard.kernels.float8_grouped import float8_grouped_mm, float8_quantize_stack, float8_stack
from fxshard.kernels.float8_ops import (
    float8_cast_both,
    float8_cast_turned,
    float8_mm,
    float8_quantize,
    float8_transposed,
)
from fxshard.passes.matrix_products import Operand, Product, call_at, stacked, unpacked_at
from fxshard.passes.mxfp8_nodes import Copy
from fxshard.planner.gather_modes import Float8Recipe

MAGNITUDE = 0x7FFF
"""The bits of a bf16 number without its sign."""
_aten, _CONVERT = torch.ops.aten, torch.ops.prims.convert_element_type.default


class Float8Nodes:
    """Writes products in float8. Every copy lies along the dimension that its product sums over.

    ``both``: what products sum over in both directions. ``gradients``: the operands that are gradients of outputs.
    """

    def __init__(
        self,
        graph: fx.Graph,
        recipe: Float8Recipe,
        weights: Collection[fx.Node],
        both: Collection[fx.Node],
        gradients: Collection[fx.Node],
    ) -> None:
        self._graph, self._recipe = graph, recipe
        self._weights, self._both, self._gradients = weights, both, gradients
        self._user: fx.Node

    def replaces(self, product: Product, gradient: bool) -> bool:
        """Whether a chosen product runs in float8; ``gradient``: it is a weight's. Those of experts are bf16."""
        return not gradient or (self._recipe.quantized_wgrad and product.offsets is None)

    def prepared(self, product: Product) -> Product:
        """A product whose operands are told from those of others: experts have scales per row, whatever linears do."""
        if product.offsets is None:
            return product
        left, right = (replace(each, offsets=product.offsets) for each in (product.left, product.right))
        return replace(product, left=left, right=right)

    def quantize(self, operand: Operand, value: fx.Node, user: fx.Node) -> dict[Operand, Copy]:
        """Quantize a matrix before its first use; where one read serves both directions, for both."""
        self._user = user
        with self._graph.inserting_before(user):
            if operand.offsets is not None:
                return {operand: self._of_experts(operand, value)}
            if operand.base in self._weights:
                return {operand: self._weight(value, operand.axis)}
            dtype = self._recipe.gradient_dtype if operand.base in self._gradients else E4M3
            by_tensor = self._recipe.scaling is Scaling.TENSOR
            scales = self._scales(self._largest(value, ROWWISE if by_tensor else operand.axis), dtype)
            if by_tensor and operand.base in self._both:
                plain, turned = unpacked_at(user, float8_cast_both, value, scales, dtype)
                rowwise, columnwise = (Operand(operand.base, axis) for axis in (ROWWISE, COLUMNWISE))
                return {rowwise: (plain, scales), columnwise: (turned, scales)}
            if operand.axis == ROWWISE:
                return {operand: (self._cast(value, scales, dtype), scales)}
            turned = self._call(float8_cast_turned, value, scales, dtype)
            return {operand: (turned, self._turned(scales))}

    def multiply(self, product: Product, copies: dict[Operand, Copy], dtype: torch.dtype) -> fx.Node:
        """The product of quantized operands, before the one that it takes the place of."""
        operands = (*copies[product.left], *copies[product.right])
        if product.offsets is not None:
            with self._graph.inserting_before(product.node):
                return self._graph.call_function(float8_grouped_mm, (*operands, product.offsets))
        forward = any(each.base in self._weights and each.axis == ROWWISE for each in (product.left, product.right))
        with self._graph.inserting_before(product.node):
            return self._graph.call_function(float8_mm, (*operands, self._recipe.fast(forward=forward), dtype))

    def _of_experts(self, operand: Operand, value: fx.Node) -> Copy:
        """Tokens, or a stack of weights, with a scale per row."""
        members = stacked(value)
        if members:  # each for itself: where they rest quantized, the stack is one of copies
            scaling, axis = self._recipe.scaling, operand.axis
            if scaling is Scaling.BLOCK:
                raise PassError(
                    f"{members[0].name} and others are the linears of experts, which multiply with scales of rows, and "
                    'not of blocks: use Float8(scaling="row") or "tensor", or exclude them'
                )
            args = (str(scaling), self._recipe.axis(axis))
            parts = [unpacked_at(self._user, float8_quantize, each, *args) for each in members]
            both = [part[0] for part in parts], [part[1] for part in parts]
            data, scales = unpacked_at(self._user, float8_stack, *both, axis)
            return data, scales
        if operand.base in self._weights:
            data, scales = unpacked_at(self._user, float8_quantize_stack, value, operand.axis)
            return data, scales
        magnitude = self._call(_aten.bitwise_and.Scalar, self._bits(value), MAGNITUDE)
        largest = self._widened(self._along(magnitude, 1))
        scales = self._scales(largest, E4M3)
        return self._cast(value, scales, E4M3), scales

    def _weight(self, value: fx.Node, axis: int) -> Copy:
        scaling, copy = self._recipe.scaling, self._recipe.axis(axis)
        data, scales = unpacked_at(self._user, float8_quantize, value, str(scaling), copy)
        if axis == ROWWISE:
            return data, scales
        return self._call(float8_transposed, data), self._turned(scales)

    def _largest(self, value: fx.Node, axis: int) -> fx.Node:
        """The bits of largest magnitudes, whose order is theirs, as of float32.

        Along the rows first where that can be part of the kernel that produces the value.
        """
        scaling = self._recipe.scaling
        magnitude = self._call(_aten.bitwise_and.Scalar, self._bits(value), MAGNITUDE)
        if scaling is Scaling.BLOCK:
            found = self._largest_of_blocks(magnitude, axis)
        else:
            found = self._along(magnitude, axis)
        if scaling is Scaling.TENSOR:
            found = self._along(found, 1 - axis)
        return self._widened(found)

    def _along(self, magnitude: fx.Node, axis: int) -> fx.Node:
        """The largest along rows or columns; zero of none, as of no tokens."""
        shape = magnitude.meta["val"].shape
        if isinstance(shape[axis], int) and shape[axis] == 0:
            magnitude = self._call(_aten.constant_pad_nd.default, magnitude, [0, 1] if axis else [0, 0, 0, 1], 0)
        return self._call(_aten.amax.default, magnitude, [axis], True)

    def _bits(self, value: fx.Node) -> fx.Node:
        if value.meta["val"].dtype != torch.bfloat16:
            value = self._call(_CONVERT, value, torch.bfloat16)
        return self._call(_aten.view.dtype, value, torch.int16)

    def _widened(self, bits: fx.Node) -> fx.Node:
        """Bits of bf16 as those of float32."""
        return self._call(_aten.mul.Tensor, self._call(_CONVERT, bits, torch.int32), 1 << 16)

    def _largest_of_blocks(self, magnitude: fx.Node, axis: int) -> fx.Node:
        rows, columns = magnitude.meta["val"].shape
        if axis == ROWWISE:  # which 128 divides: of activations and gradients those are the sizes of a weight
            tiles = self._call(_aten.view.default, magnitude, [rows, columns // BLOCK, BLOCK])
            return self._call(_aten.amax.default, tiles, [2])
        short = -rows % BLOCK
        if short:
            magnitude = self._call(_aten.constant_pad_nd.default, magnitude, [0, 0, 0, short], 0)
        tiles = self._call(_aten.view.default, magnitude, [(rows + short) // BLOCK, BLOCK, columns])
        return self._call(_aten.amax.default, tiles, [1])

    def _scales(self, bits: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``float8.scales_of``"""
        exponent = EXPONENT[dtype]
        bits = self._call(_aten.add.Tensor, bits, ROUND_UP)
        bits = self._call(_aten.bitwise_and.Scalar, bits, EXPONENT_BITS)
        bits = self._call(_aten.clamp_min.default, bits, exponent + 1 << 23)
        bits = self._call(_aten.sub.Tensor, bits, exponent << 23)
        return self._call(_aten.view.dtype, bits, torch.float32)

    def _cast(self, value: fx.Node, scales: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``float8.cast``"""
        bits = self._call(_aten.neg.default, self._call(_aten.view.dtype, scales, torch.int32))
        factors = self._call(_aten.view.dtype, self._call(_aten.add.Tensor, bits, TWICE_ONE), torch.float32)
        wide = self._call(_aten.view.dtype, self._widened(self._bits(value)), torch.float32)
        shape = value.meta["val"].shape
        blocks = scales.meta["val"].shape[1] > 1
        if blocks:
            wide = self._call(_aten.view.default, wide, [shape[0], shape[1] // BLOCK, BLOCK])
            factors = self._call(_aten.unsqueeze.default, factors, 2)
        scaled = self._call(_aten.mul.Tensor, wide, factors)
        if blocks:
            scaled = self._call(_aten.view.default, scaled, list(shape))
        limited = self._call(_aten.clamp_min.default, scaled, -LARGEST[dtype])
        limited = self._call(_aten.clamp_max.default, limited, LARGEST[dtype])
        return self._call(_CONVERT, limited, dtype)

    def _turned(self, scales: fx.Node) -> fx.Node:
        one = scales.meta["val"].numel() == 1
        if one:
            return scales
        turned = self._call(_aten.permute.default, scales, [1, 0])
        return self._call(_aten.clone.default, turned, memory_format=torch.contiguous_format)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call_at(self._user, target, *args, **kwargs)
