"""The products of experts in MXFP8 as operators; see ``mxfp8_grouped`` for what they compute."""

from __future__ import annotations

from typing import Any

import torch

from fxshard.kernels.mxfp8 import COLUMNWISE, E4M3, ROWWISE, Quantized
from fxshard.kernels.mxfp8_grouped import multiply_groups, quantize_groups, scale_rows, weight_gradients
from fxshard.kernels.ops import define


def _quantize_groups(value: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    copy = quantize_groups(value, offsets)
    return copy.data, copy.scales


def _fake_quantize(value: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = scale_rows(value.shape[0], offsets.shape[0])
    return value.new_empty(value.shape, dtype=E4M3), value.new_empty((rows, value.shape[1]), dtype=torch.uint8)


def _stack(data: list[torch.Tensor], scales: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The copies of several matrices as that of a stack of them."""
    return torch.stack([each.view(torch.uint8) for each in data]).view(E4M3), torch.stack(scales)


def _fake_stack(data: list[torch.Tensor], scales: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return data[0].new_empty((len(data), *data[0].shape)), scales[0].new_empty((len(scales), *scales[0].shape))


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
mxfp8_stack = define("mxfp8_stack(Tensor[] data, Tensor[] scales) -> (Tensor, Tensor)", _stack, _fake_stack)
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
