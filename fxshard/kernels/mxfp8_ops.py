"""MXFP8 as operators that captured graphs call: quantize, and multiply what is quantized.

Compiled segments call them like any other kernel, so eager and Inductor lowerings give the same bits. Those for the
tokens and weights of experts are in ``mxfp8_grouped``.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.kernels import mxfp8_products as products
from fxshard.kernels.mxfp8 import COLUMNWISE, ROWWISE, Quantized
from fxshard.kernels.ops import define
from fxshard.kernels.quantize import empty, quantize_both, quantize_one


def _quantize(value: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, or each of a stack: 32 divides their rows, so the stack's blocks are those of one tall matrix."""
    copy = quantize_one(value.contiguous().view(-1, value.shape[-1]), axis)
    return _stacked(copy.data, value), _stacked(copy.scales, value)


def _quantize_both(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rowwise, columnwise = quantize_both(value.contiguous())
    return rowwise.data, rowwise.scales, columnwise.data, columnwise.scales


def _fake_quantize(value: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    copy = empty(value.reshape(-1, value.shape[-1]), axis)
    return _stacked(copy.data, value), _stacked(copy.scales, value)


def _fake_both(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rowwise, columnwise = empty(value, ROWWISE), empty(value, COLUMNWISE)
    return rowwise.data, rowwise.scales, columnwise.data, columnwise.scales


def _stacked(tall: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tall if like.ndim == 2 else tall.view(like.shape[0], -1, tall.shape[-1])


def _multiply(a: Any, a_scales: Any, b: Any, b_scales: Any, a_axis: int, b_axis: int, dtype: Any) -> torch.Tensor:
    return products.multiply(Quantized(a, a_scales, a_axis), Quantized(b, b_scales, b_axis), dtype)


def _multiply_into(a: Any, a_scales: Any, b: Any, b_scales: Any, a_axis: int, b_axis: int, out: torch.Tensor) -> None:
    products.multiply_into(Quantized(a, a_scales, a_axis), Quantized(b, b_scales, b_axis), out)


def _fake_multiply(a: Any, a_scales: Any, b: Any, b_scales: Any, a_axis: int, b_axis: int, dtype: Any) -> torch.Tensor:
    made: torch.Tensor = a.new_empty((a.shape[1 - a_axis], b.shape[1 - b_axis]), dtype=dtype)
    return made


def _flops(a: Any, a_scales: Any, b: Any, b_scales: Any, a_axis: int, b_axis: int, *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1 - b_axis]


_OPERANDS = "Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, int a_axis, int b_axis"

mxfp8_quantize = define("mxfp8_quantize(Tensor value, int axis) -> (Tensor, Tensor)", _quantize, _fake_quantize)
mxfp8_quantize_both = define(
    "mxfp8_quantize_both(Tensor value) -> (Tensor, Tensor, Tensor, Tensor)", _quantize_both, _fake_both
)
mxfp8_mm = define(f"mxfp8_mm({_OPERANDS}, ScalarType dtype) -> Tensor", _multiply, _fake_multiply, flops=_flops)
mxfp8_mm_into = define(
    f"mxfp8_mm_into({_OPERANDS}, Tensor(c!) out) -> ()", _multiply_into, lambda *_: None, flops=_flops
)
