"""Matrix products of quantized matrices: by the hardware where it can, elsewhere with the same values dequantized."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fxshard.precision.mxfp8 import BLOCK, COLUMNWISE, E4M3, ROWWISE, dequantize
from fxshard.precision.swizzle import swizzle

CAPABILITY = (10, 0)
"""From here on a GPU multiplies MXFP8 by itself."""


@functools.cache
def scaled_products(device: torch.device) -> bool:
    """Whether products go through torch's scaled GEMM."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def path(device: torch.device) -> str:
    """How products are computed on a device, in words."""
    if scaled_products(device):
        return "torch.nn.functional.scaled_mm"
    if device.type != "cuda":
        return f"dequantize and multiply in float32 ({device.type} has no MXFP8 product)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"dequantize and multiply in bfloat16 (compute capability {major}.{minor}; MXFP8 products need 10.0)"


def multiply(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    a_axis: int,
    b_axis: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product over the dimensions along which the blocks of ``a`` and ``b`` run.

    Forward is ``x`` rowwise times ``w`` rowwise, the input gradient ``dy`` rowwise times ``w`` columnwise, the weight
    gradient ``dy`` columnwise times ``x`` columnwise.
    """
    if scaled_products(a.device):
        return _scaled(a, a_scales, b, b_scales, a_axis, b_axis, dtype)
    # bf16 holds dequantized values exactly; the CPU has quick products in float32 only.
    wide = torch.bfloat16 if a.device.type == "cuda" else torch.float32
    left, right = dequantize(a, a_scales, a_axis, wide), dequantize(b, b_scales, b_axis, wide)
    product = torch.mm(left if a_axis == ROWWISE else left.t(), right if b_axis == COLUMNWISE else right.t())
    return product.to(dtype)


def _scaled(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    a_axis: int,
    b_axis: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    left, left_scales = contracted_last(a, a_scales, a_axis)
    right, right_scales = contracted_last(b, b_scales, b_axis)
    recipe, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(
        left,
        right.t(),
        left_scales,
        recipe,
        right_scales,
        recipe,
        swizzle_a=order,
        swizzle_b=order,
        output_dtype=dtype,
    )


def contracted_last(data: torch.Tensor, scales: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy as scaled GEMMs read it: blocks along the last dimension, whole, and swizzled scales."""
    if axis == COLUMNWISE:
        data, scales = data.view(torch.uint8).t().contiguous().view(E4M3), scales.t()
    short = -data.shape[1] % BLOCK
    if short:
        data = F.pad(data.view(torch.uint8), (0, short)).view(E4M3)
    return data, swizzle(scales).view(torch.float8_e8m0fnu)
