"""MXFP8 as operators that captured graphs call: quantize, and multiply what is quantized.

Compiled segments call them like any other kernel, so eager and Inductor lowerings give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from fxshard.precision import products
from fxshard.precision.kernels import empty, quantize_both, quantize_one
from fxshard.precision.mxfp8 import COLUMNWISE, ROWWISE

_library = torch.library.Library("fxshard", "FRAGMENT")
_library.define("mxfp8_quantize(Tensor value, int axis) -> (Tensor, Tensor)")
_library.define("mxfp8_quantize_both(Tensor value) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    "mxfp8_mm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, int a_axis, int b_axis, ScalarType dtype) -> Tensor"
)


def _quantize(value: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    copy = quantize_one(value.contiguous(), axis)
    return copy.data, copy.scales


def _quantize_both(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rowwise, columnwise = quantize_both(value.contiguous())
    return rowwise.data, rowwise.scales, columnwise.data, columnwise.scales


_library.impl("mxfp8_quantize", _quantize, "CompositeExplicitAutograd")
_library.impl("mxfp8_quantize_both", _quantize_both, "CompositeExplicitAutograd")
_library.impl("mxfp8_mm", products.multiply, "CompositeExplicitAutograd")


@torch.library.register_fake("fxshard::mxfp8_quantize", lib=_library)
def _(value: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    copy = empty(value, axis)
    return copy.data, copy.scales


@torch.library.register_fake("fxshard::mxfp8_quantize_both", lib=_library)
def _(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rowwise, columnwise = empty(value, ROWWISE), empty(value, COLUMNWISE)
    return rowwise.data, rowwise.scales, columnwise.data, columnwise.scales


@torch.library.register_fake("fxshard::mxfp8_mm", lib=_library)
def _(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    a_axis: int,
    b_axis: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return a.new_empty((a.shape[1 - a_axis], b.shape[1 - b_axis]), dtype=dtype)


@register_flop_formula(torch.ops.fxshard.mxfp8_mm)
def _(
    a: Any, a_scales: Any, b: Any, b_scales: Any, a_axis: int, b_axis: int, dtype: Any, out_shape: Any = None, **_: Any
) -> int:
    return 2 * a[0] * a[1] * b[1 - b_axis]


mxfp8_quantize = torch.ops.fxshard.mxfp8_quantize.default
mxfp8_quantize_both = torch.ops.fxshard.mxfp8_quantize_both.default
mxfp8_mm = torch.ops.fxshard.mxfp8_mm.default
