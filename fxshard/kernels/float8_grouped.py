"""Experts in float8: tokens, sorted by expert, times a stack of weights, with a scale per row of either.

``offsets[e]`` is where the tokens of expert e end. A stack is ``[experts, outputs, inputs]``: each matrix lies along
the dimension that is summed over, and each of its rows has a scale. That is how torch's grouped product takes them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fxshard.kernels.by_torch import TorchExperts
from fxshard.kernels.float8 import E4M3, ROWWISE, dequantize, scales_of
from fxshard.kernels.float8_cast import cast_into
from fxshard.kernels.mxfp8_products import wide_dtype
from fxshard.kernels.ops import define

MAJOR = 9
"""The compute capability for which torch has the product."""


@functools.cache
def grouped_products(device: torch.device) -> bool:
    """Whether products of experts go through torch's scaled grouped GEMM."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == MAJOR


def grouped_path(device: torch.device) -> str:
    """How the products of experts are computed, in words."""
    if grouped_products(device):
        return "torch._scaled_grouped_mm, a scale per row; weight gradients in bf16"
    how = "one grouped product" if device.type == "cuda" else "one expert after the other"
    wide = str(wide_dtype(device)).removeprefix("torch.")
    return f"dequantize and multiply in {wide}, {how}; weight gradients in bf16"


def quantize_stack(value: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A stack ``[experts, rows, columns]`` for products that sum over ``axis`` of its matrices: payload, with that
    dimension last, and scales ``[experts, the other]``.
    """
    summed = 1 + axis
    scales = scales_of(torch.linalg.vector_norm(value, torch.inf, summed, keepdim=True, dtype=torch.float32), E4M3)
    data = torch.empty(value.shape if axis == ROWWISE else value.mT.shape, dtype=E4M3, device=value.device)
    cast_into(value, scales, **{"plain" if axis == ROWWISE else "turned": data})
    return data, scales.squeeze(summed)


def stack(data: list[torch.Tensor], scales: list[torch.Tensor], axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of matrices, with a scale per tensor or row, as that of a stack for products that sum over ``axis``."""
    lie = [each.view(torch.uint8) if axis == ROWWISE else each.view(torch.uint8).t() for each in data]
    down = [(each if axis == ROWWISE else each.t()).expand(len(lie[0]), 1).flatten() for each in scales]
    return torch.stack(lie).view(E4M3), torch.stack(down)


def multiply_groups(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Each token times the matrix of its expert, in bf16."""
    if grouped_products(a.device):
        return torch._scaled_grouped_mm(
            a, b.mT, a_scales.view(-1), b_scales, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    wide = wide_dtype(a.device)
    stack = dequantize(b.flatten(0, 1), b_scales.view(-1, 1), wide).view(b.shape)
    return TorchExperts().product(dequantize(a, a_scales, wide), stack.mT, offsets).to(torch.bfloat16)


def _fake_quantize(value: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = value.shape if axis == ROWWISE else value.mT.shape
    return value.new_empty(shape, dtype=E4M3), value.new_empty(shape[:2], dtype=torch.float32)


def _fake_stack(data: Any, scales: Any, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = data[0].shape if axis == ROWWISE else data[0].shape[::-1]
    made: torch.Tensor = data[0].new_empty((len(data), rows, columns))
    return made, scales[0].new_empty((len(data), rows))


def _fake_multiply(a: Any, a_scales: Any, b: Any, b_scales: Any, offsets: Any) -> torch.Tensor:
    made: torch.Tensor = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)
    return made


float8_quantize_stack = define(
    "float8_quantize_stack(Tensor value, int axis) -> (Tensor, Tensor)", quantize_stack, _fake_quantize, contiguous=True
)
float8_stack = define("float8_stack(Tensor[] data, Tensor[] scales, int axis) -> (Tensor, Tensor)", stack, _fake_stack)
float8_grouped_mm = define(
    "float8_grouped_mm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor offsets) -> Tensor",
    multiply_groups,
    _fake_multiply,
    flops=lambda a, a_scales, b, *_, **__: 2 * a[0] * b[1] * b[2],
    contiguous=True,
)
