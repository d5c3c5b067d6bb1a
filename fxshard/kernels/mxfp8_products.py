"""Matrix products of quantized matrices: by the hardware where it can, otherwise with the same values dequantized."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fxshard.kernels.mxfp8 import BLOCK, COLUMNWISE, E4M3, ROWWISE, Quantized
from fxshard.kernels.ops import mm_into

CAPABILITY = (10, 0)
"""From here on a GPU multiplies MXFP8 by itself."""
TILE_ROWS, TILE_COLUMNS = 128, 4


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


def grouped_path(device: torch.device) -> str:
    """How the products of experts are computed, in words."""
    if scaled_products(device):
        return f"{path(device)}, one expert after the other"
    how = "one grouped product" if device.type == "cuda" else "one expert after the other"
    return f"dequantize and multiply in {str(wide_dtype(device)).removeprefix('torch.')}, {how}"


def multiply(left: Quantized, right: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """The product over the dimensions along which the blocks of both run.

    Forward is ``x`` rowwise times ``w`` rowwise, the input gradient ``dy`` rowwise times ``w`` columnwise, the weight
    gradient ``dy`` columnwise times ``x`` columnwise.
    """
    if scaled_products(left.data.device):
        return _scaled(left, right, dtype)
    return wide_product(*_dequantized(left, right), dtype)


def multiply_into(left: Quantized, right: Quantized, out: torch.Tensor) -> None:
    """The same, written where it stays."""
    if scaled_products(left.data.device):
        out.copy_(_scaled(left, right, out.dtype))
        return
    wide_product_into(*_dequantized(left, right), out)


def wide_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product of dequantized values."""
    if a.device.type == "cuda" and dtype != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)  # sums are float32 anyway: not rounded in between
    return torch.mm(a, b).to(dtype)


def wide_product_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The same, written where it stays."""
    if a.dtype == out.dtype or a.device.type == "cuda":
        mm_into(a, b, out)
    else:
        out.copy_(torch.mm(a, b))


def wide_dtype(device: torch.device) -> torch.dtype:
    """What dequantized values are multiplied in: bf16 holds them exactly, but the CPU has quick products in float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _dequantized(left: Quantized, right: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = wide_dtype(left.data.device)
    a, b = left.dequantize(dtype), right.dequantize(dtype)
    return a if left.axis == ROWWISE else a.t(), b if right.axis == COLUMNWISE else b.t()


def _scaled(left: Quantized, right: Quantized, dtype: torch.dtype) -> torch.Tensor:
    a, a_scales = contracted_last(left)
    b, b_scales = contracted_last(right)
    recipe, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(
        a, b.t(), a_scales, recipe, b_scales, recipe, swizzle_a=order, swizzle_b=order, output_dtype=dtype
    )


def contracted_last(copy: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy as scaled GEMMs read it: blocks along the last dimension, whole, and swizzled scales."""
    data, scales = copy.data, copy.scales
    if copy.axis == COLUMNWISE:
        data, scales = data.view(torch.uint8).t().contiguous().view(E4M3), scales.t()
    short = -data.shape[1] % BLOCK
    if short:
        data = F.pad(data.view(torch.uint8), (0, short)).view(E4M3)
    return data, swizzle(scales).view(torch.float8_e8m0fnu)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Compact scales ``[rows, blocks]`` as products read them, flat; padded with zeros to tiles.

    A tile of 128 rows × 4 scales becomes 512 bytes, ``(y % 32)·16 + (y / 32)·4 + x`` for the scale at ``(y, x)``; tiles
    follow each other row by row.
    """
    rows, blocks = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -blocks % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    tiles = padded.view(padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
