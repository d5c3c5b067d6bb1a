"""The MXFP8 format: blocks of 32 E4M3 values that share a power of two. Quantize and dequantize, in plain torch.

Blocks run along the last dimension (*rowwise*, 1×32) or down the columns (*columnwise*, 32×1). Neither copy can be made
from the other: both are quantized from the same high-precision value. Payloads keep the ``[M, K]`` order of the value.
Scales are E8M0 bytes and stay compact here: ``[M, K/32]`` rowwise, ``[⌈M/32⌉, K]`` columnwise. Where the number of rows
is not a multiple of 32 the last columnwise block is shorter, as if padded with zeros.

Every result is that of Transformer Engine, to the bit. This file is the definition; ``quantize`` is the fast one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 32
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest E4M3 value."""

ROWWISE, COLUMNWISE = 1, 0
"""The dimension along which blocks run."""

_RECIPROCAL_OF_LARGEST = 0x3B124925  # fp32 1/448
_NAN = 0x7F


@dataclass(frozen=True)
class Quantized:
    """One quantized copy: E4M3 payload and E8M0 scales, and the dimension along which its blocks run."""

    data: torch.Tensor
    scales: torch.Tensor
    axis: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return dequantize(self.data, self.scales, self.axis, dtype)


def quantize(value: torch.Tensor, axis: int) -> Quantized:
    """Quantize a matrix with blocks along ``axis``."""
    rows, columns = value.shape
    wide = value.float()
    if axis == ROWWISE:
        blocks = wide.view(rows, columns // BLOCK, BLOCK)
    else:
        short = -rows % BLOCK
        padded = torch.nn.functional.pad(wide, (0, 0, 0, short)) if short else wide
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, columns)
    scales = block_scales(blocks, dim=2 if axis == ROWWISE else 1)
    payload = to_e4m3(blocks * _reciprocals(scales).unsqueeze(2 if axis == ROWWISE else 1))
    return Quantized(payload.view(payload.numel() // columns, columns)[:rows], scales, axis)


def block_scales(blocks: torch.Tensor, dim: int) -> torch.Tensor:
    """The E8M0 scale of each block: the largest magnitude over 448, rounded up to a power of two; NaN is ignored."""
    largest = blocks.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(dim)
    return to_e8m0(largest * _bits_to_float(_RECIPROCAL_OF_LARGEST, blocks.device))


def to_e8m0(value: torch.Tensor) -> torch.Tensor:
    """Non-negative fp32 to E8M0, rounded up; infinity becomes the largest scale, NaN stays NaN (0xFF)."""
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    # 2^-127 is the smallest scale: a denormal up to it needs no rounding up.
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    rounded = exponent + up.int()
    rounded = torch.where(value == torch.inf, 0xFE, rounded)
    return torch.where(value.isnan(), 0xFF, rounded).to(torch.uint8)


def to_e4m3(value: torch.Tensor) -> torch.Tensor:
    """fp32 to E4M3, nearest even, saturating; every NaN becomes the one without a sign."""
    payload = value.clamp(-LARGEST, LARGEST).to(E4M3)
    return torch.where(value.isnan(), _NAN, payload.view(torch.uint8)).view(E4M3)


def dequantize(data: torch.Tensor, scales: torch.Tensor, axis: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of a quantized copy. bf16 holds them exactly, as long as they are in its range."""
    rows, columns = data.shape
    values, factors = data.float(), scale_values(scales)
    if axis == ROWWISE:
        return (values.view(rows, columns // BLOCK, BLOCK) * factors.unsqueeze(2)).view(rows, columns).to(dtype)
    return (values * factors.repeat_interleave(BLOCK, 0)[:rows]).to(dtype)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes as fp32: 2^(e − 127), NaN for 255."""
    exponent = scales.to(torch.int32)
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
    return torch.where(exponent == 0xFF, 0x7FC00000, bits).view(torch.float32)


def _reciprocals(scales: torch.Tensor) -> torch.Tensor:
    """2^(127 − e), which is a denormal for the largest scale."""
    exponent = scales.to(torch.int32)
    bits = torch.where(exponent == 0xFE, 0x00400000, (0xFE - exponent) << 23)
    return torch.where(exponent == 0xFF, 0x7FC00000, bits).view(torch.float32)


def _bits_to_float(bits: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)
