"""Experts in MXFP8: blocks that do not reach from one expert's tokens into the next's, and products group by group.

Tokens are sorted by expert; ``offsets[e]`` is where those of expert e end. What sums over tokens has blocks of 32 of
them, counted from the first token of each expert; the last block of an expert may be shorter, as if padded with zeros.
The scales of the block that starts at row ``r`` of expert e's tokens, which begin at ``b``, are row
``b // 32 + e + r // 32``: no two blocks meet there, and nothing has to be read on the host to know how many rows there
are. Weights are stacks ``[experts, rows, columns]``, each matrix quantized for itself.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.kernels.by_torch import TorchExperts, groups
from fxshard.kernels.mxfp8 import BLOCK, COLUMNWISE, E4M3, ROWWISE, Quantized, scale_values
from fxshard.kernels.mxfp8_products import multiply, scaled_products, wide_dtype
from fxshard.kernels.ops import define
from fxshard.kernels.quantize import quantize_one


def scale_rows(tokens: int, experts: int) -> int:
    """Rows of scales of so many tokens; some stay unused. Rows after the last offset count as one more expert's."""
    return tokens // BLOCK + experts + 1


def quantize_groups(value: torch.Tensor, offsets: torch.Tensor) -> Quantized:
    """Quantize tokens in blocks down each expert's."""
    block, within = _blocks(value.shape[0], offsets)
    padded = value.new_zeros(scale_rows(value.shape[0], offsets.shape[0]) * BLOCK, value.shape[1])
    rows = block * BLOCK + within
    padded[rows] = value
    copy = quantize_one(padded, COLUMNWISE)
    return Quantized(copy.data.view(torch.uint8)[rows].view(E4M3), copy.scales, COLUMNWISE)


def dequantize_groups(tokens: Quantized, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    block, _ = _blocks(tokens.data.shape[0], offsets)
    return (tokens.data.float() * scale_values(tokens.scales)[block]).to(dtype)


def multiply_groups(tokens: Quantized, weights: Quantized, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each token, quantized rowwise, times the matrix of its expert, over the dimension along which blocks run."""
    contracted = 2 if weights.axis == ROWWISE else 1
    if scaled_products(tokens.data.device):
        out = tokens.data.new_zeros((tokens.data.shape[0], weights.data.shape[3 - contracted]), dtype=dtype)
        for e, (begin, end) in enumerate(groups(offsets)):
            if begin < end:
                some = Quantized(tokens.data[begin:end], tokens.scales[begin:end], ROWWISE)
                out[begin:end] = multiply(some, Quantized(weights.data[e], weights.scales[e], weights.axis), dtype)
        return out
    wide = wide_dtype(tokens.data.device)
    stack = _dequantize_stack(weights, wide)
    product = TorchExperts().product(tokens.dequantize(wide), stack.mT if contracted == 2 else stack, offsets)
    return product.to(dtype)


def weight_gradients(a: Quantized, b: Quantized, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``aᵀ b`` over the tokens of each expert, both quantized down them."""
    if scaled_products(a.data.device):
        out = a.data.new_zeros((offsets.shape[0], a.data.shape[1], b.data.shape[1]), dtype=dtype)
        for e, (begin, end) in enumerate(groups(offsets)):
            if begin < end:
                first = begin // BLOCK + e
                blocks = slice(first, first - (begin - end) // BLOCK)
                left, right = (Quantized(each.data[begin:end], each.scales[blocks], COLUMNWISE) for each in (a, b))
                out[e] = multiply(left, right, dtype)
        return out
    wide = wide_dtype(a.data.device)
    left_values, right_values = dequantize_groups(a, offsets, wide), dequantize_groups(b, offsets, wide)
    return TorchExperts().weight_gradient(left_values, right_values, offsets).to(dtype)


def _blocks(tokens: int, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token: the row of its scales, and its place in the block."""
    position = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets, position, right=True)
    begin = torch.cat((offsets.new_zeros(1), offsets))[expert]
    within = position - begin
    return begin // BLOCK + expert + within // BLOCK, within % BLOCK


def _dequantize_stack(stack: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """A stack's blocks are those of one tall matrix: 32 divides the rows of each."""
    tall = Quantized(stack.data.flatten(0, 1), stack.scales.flatten(0, 1), stack.axis)
    return tall.dequantize(dtype).view(stack.data.shape)


# -- operators ---------------------------------------------------------------------------------------------------------


def _quantize_groups(value: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    copy = quantize_groups(value, offsets)
    return copy.data, copy.scales


def _fake_quantize(value: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = scale_rows(value.shape[0], offsets.shape[0])
    return value.new_empty(value.shape, dtype=E4M3), value.new_empty((rows, value.shape[1]), dtype=torch.uint8)


def _stack(data: list[torch.Tensor], scales: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The copies of several matrices as that of a stack of them."""
    return torch.stack([each.view(torch.uint8) for each in data]).view(E4M3), torch.stack(scales)


def _multiply(a: Any, a_scales: Any, b: Any, b_scales: Any, offsets: Any, axis: int, dtype: Any) -> torch.Tensor:
    return multiply_groups(Quantized(a, a_scales, ROWWISE), Quantized(b, b_scales, axis), offsets, dtype)


def _fake_multiply(a: Any, a_scales: Any, b: Any, b_scales: Any, offsets: Any, axis: int, dtype: Any) -> torch.Tensor:
    made: torch.Tensor = a.new_empty((a.shape[0], b.shape[2 - axis]), dtype=dtype)
    return made


def _wgrad(a: Any, a_scales: Any, b: Any, b_scales: Any, offsets: Any, dtype: Any) -> torch.Tensor:
    return weight_gradients(Quantized(a, a_scales, COLUMNWISE), Quantized(b, b_scales, COLUMNWISE), offsets, dtype)


def _fake_wgrad(a: Any, a_scales: Any, b: Any, b_scales: Any, offsets: Any, dtype: Any) -> torch.Tensor:
    made: torch.Tensor = a.new_empty((offsets.shape[0], a.shape[1], b.shape[1]), dtype=dtype)
    return made


_OPERANDS = "Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor offsets"

mxfp8_quantize_groups = define(
    "mxfp8_quantize_groups(Tensor value, Tensor offsets) -> (Tensor, Tensor)", _quantize_groups, _fake_quantize
)
mxfp8_stack = define("mxfp8_stack(Tensor[] data, Tensor[] scales) -> (Tensor, Tensor)", _stack, _stack)
mxfp8_grouped_mm = define(
    f"mxfp8_grouped_mm({_OPERANDS}, int axis, ScalarType dtype) -> Tensor",
    _multiply,
    _fake_multiply,
    flops=lambda a, a_scales, b, *_, **__: 2 * a[0] * b[1] * b[2],
)
mxfp8_grouped_wgrad = define(
    f"mxfp8_grouped_wgrad({_OPERANDS}, ScalarType dtype) -> Tensor",
    _wgrad,
    _fake_wgrad,
    flops=lambda a, a_scales, b, *_, **__: 2 * a[0] * a[1] * b[1],
)
