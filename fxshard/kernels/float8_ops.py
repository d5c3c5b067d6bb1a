"""Float8 as operators that captured graphs call: cast what has to be transposed, quantize weights, multiply.

What a compiler can fuse into the kernel that produces a value (largest magnitudes, scales, casts that stay in place)
is no operator of ours but plain nodes, see ``passes/float8_nodes``.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.kernels import float8_products as products
from fxshard.kernels.float8 import E4M3, Scaling, largest_of, scale_shape, scales_of
from fxshard.kernels.float8_cast import cast_both, cast_plain, cast_turned, transposed
from fxshard.kernels.ops import define


def _quantize(value: torch.Tensor, scaling: str, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, as it lies, whichever dimension products sum over."""
    scales = scales_of(largest_of(value, Scaling(scaling), axis, weight=True), E4M3)
    return cast_plain(value, scales, E4M3), scales


def _fake_quantize(value: torch.Tensor, scaling: str, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales = value.new_empty(scale_shape(tuple(value.shape), Scaling(scaling), axis), dtype=torch.float32)
    return value.new_empty(value.shape, dtype=E4M3), scales


def _fake_plain(value: torch.Tensor, scales: torch.Tensor, dtype: Any) -> torch.Tensor:
    return value.new_empty(value.shape, dtype=dtype)


def _fake_turned(value: torch.Tensor, scales: torch.Tensor, dtype: Any) -> torch.Tensor:
    return value.new_empty((value.shape[1], value.shape[0]), dtype=dtype)


def _fake_both(value: torch.Tensor, scales: torch.Tensor, dtype: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_plain(value, scales, dtype), _fake_turned(value, scales, dtype)


def _fake_multiply(a: Any, a_scales: Any, b: Any, b_scales: Any, fast: bool, dtype: Any) -> torch.Tensor:
    made: torch.Tensor = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
    return made


def _multiply(a: Any, a_scales: Any, b: Any, b_scales: Any, fast: bool, dtype: Any) -> torch.Tensor:
    return products.multiply(a, a_scales, b, b_scales, dtype, fast)


def _flops(a: Any, a_scales: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[0]


_OPERANDS = "Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, bool fast"
_CAST = "(Tensor value, Tensor scales, ScalarType dtype)"

float8_quantize = define(
    "float8_quantize(Tensor value, str scaling, int axis) -> (Tensor, Tensor)",
    _quantize,
    _fake_quantize,
    contiguous=True,
)
float8_cast_turned = define(f"float8_cast_turned{_CAST} -> Tensor", cast_turned, _fake_turned, contiguous=True)
float8_cast_both = define(f"float8_cast_both{_CAST} -> (Tensor, Tensor)", cast_both, _fake_both, contiguous=True)
float8_transposed = define(
    "float8_transposed(Tensor data) -> Tensor",
    transposed,
    lambda data: data.new_empty((data.shape[1], data.shape[0])),
    contiguous=True,
)
float8_mm = define(
    f"float8_mm({_OPERANDS}, ScalarType dtype) -> Tensor", _multiply, _fake_multiply, flops=_flops, contiguous=True
)
float8_mm_into = define(
    f"float8_mm_into({_OPERANDS}, Tensor(c!) out) -> ()",
    products.multiply_into,
    lambda *_: None,
    flops=_flops,
    contiguous=True,
)
