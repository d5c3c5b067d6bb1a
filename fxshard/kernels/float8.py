"""Float8 as Hopper multiplies it: E4M3 or E5M2 values, and scales per tensor, per row or per block of 128.

A scale is what a payload is multiplied with to get values back. It is a power of two, the smallest with which no value
exceeds the largest of the dtype: multiplying by it or by its reciprocal rounds nothing, so it does not matter whether a
compiler fuses it, divides by it or multiplies its sums with it, and bf16 holds every dequantized value.

Scales of a matrix are a matrix: of one element (tensor), of a row or a column of them, or of one for each block. This
file is the definition; ``float8_cast`` is the fast one.
"""

from __future__ import annotations

from enum import StrEnum

import torch

BLOCK = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
EXPONENT = {E4M3: 8, E5M2: 15}
"""Of the largest value, whose mantissa is 1.75 in both."""

ROWWISE, COLUMNWISE = 1, 0
"""The dimension that a product sums over, along which values share a scale."""

ROUND_UP = 0x1FFFFF
"""Added to the bits of a float32, carries into the exponent if the mantissa is larger than 1.75."""
EXPONENT_BITS = 0x7F800000
TWICE_ONE = 0x7F000000
"""Bits of a power of two and of its reciprocal add up to this."""


class Scaling(StrEnum):
    """What shares a scale."""

    TENSOR = "tensor"
    ROW = "row"
    """All that one element of a product sums over: a row of the left operand, a column of the right one."""
    BLOCK = "block"
    """128 of what is summed over; of weights 128 × 128."""


def scales_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scales of values whose largest magnitudes are given."""
    exponent = EXPONENT[dtype]
    bits = (largest.float().view(torch.int32) + ROUND_UP) & EXPONENT_BITS
    return (bits.clamp(min=exponent + 1 << 23) - (exponent << 23)).view(torch.float32)


def reciprocals(scales: torch.Tensor) -> torch.Tensor:
    """One over powers of two, exactly."""
    return (TWICE_ONE - scales.view(torch.int32)).view(torch.float32)


def largest_of(value: torch.Tensor, scaling: Scaling, axis: int, *, weight: bool = False) -> torch.Tensor:
    """The largest magnitudes of what shares a scale in a matrix, if products sum over ``axis`` of it."""
    if scaling is not Scaling.BLOCK:
        dims = (0, 1) if scaling is Scaling.TENSOR else (axis,)
        return torch.linalg.vector_norm(value, torch.inf, dims, keepdim=True, dtype=torch.float32)
    rows, columns = value.shape
    down, along = (BLOCK if weight or axis == dim else 1 for dim in (COLUMNWISE, ROWWISE))
    short = -rows % down, -columns % along
    padded = torch.nn.functional.pad(value, (0, short[1], 0, short[0])) if any(short) else value
    tiles = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // along, along)
    return torch.linalg.vector_norm(tiles, torch.inf, (1, 3), dtype=torch.float32)


def scale_shape(shape: tuple[int, ...], scaling: Scaling, axis: int) -> tuple[int, int]:
    """Of the scales of a weight."""
    rows, columns = shape
    if scaling is Scaling.BLOCK:
        return -(-rows // BLOCK), -(-columns // BLOCK)
    if scaling is Scaling.TENSOR:
        return 1, 1
    return (rows, 1) if axis == ROWWISE else (1, columns)


def cast(value: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values over their scales, nearest even, saturating; NaN stays NaN."""
    wide = value.float() * spread(reciprocals(scales), value.shape)
    return wide.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def dequantize(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of a payload."""
    return (data.float() * spread(scales, data.shape)).to(dtype)


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scales of blocks as scales of elements; those of rows, columns or the whole broadcast as they are."""
    for dim in (0, 1):
        if tile(scales.shape[dim], shape[dim]) == BLOCK:
            scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scales


def tile(scales: int, size: int) -> int:
    """How many of ``size`` elements share one of so many scales."""
    return size if scales == 1 else 1 if scales == size else BLOCK
