"""MXFP8 a second time, one number at a time, in Python integers and fractions: shares nothing with the package."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import torch

Values = list[float]


def bf16(bits: int) -> float:
    """The number behind 16 bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def fp32(value: Fraction) -> Fraction:
    """Round a non-negative number to fp32, nearest even, denormals included."""
    if value == 0:
        return value
    exponent = max(_floor_log2(value), -126)
    unit = Fraction(2) ** (exponent - 23)
    return _nearest_even(value / unit) * unit


def scale_of(block: Values) -> int:
    """E8M0 of the largest magnitude over 448, rounded up."""
    numbers = [abs(value) for value in block if not math.isnan(value)]
    largest = max(numbers, default=0.0)
    if math.isinf(largest):
        return 0xFE
    seventh = Fraction(*struct.unpack("<f", struct.pack("<I", 0x3B124925))[0].as_integer_ratio())
    ratio = fp32(Fraction(largest) * seventh)
    if ratio == 0:
        return 0
    exponent = _floor_log2(ratio)
    if Fraction(2) ** exponent < ratio:
        exponent += 1
    return max(exponent, -127) + 127


def e4m3(value: float, scale: int) -> int:
    """The byte of ``value / 2^(scale - 127)``: nearest even, saturating."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    if math.isinf(value):
        return sign | 0x7E
    exact = abs(Fraction(value)) / Fraction(2) ** (scale - 127)
    if scale == 0xFE:
        exact = fp32(exact)  # the product may be a denormal
    if exact == 0:
        return sign
    exponent = max(_floor_log2(exact), -6)
    unit = Fraction(2) ** (exponent - 3)
    steps = _nearest_even(exact / unit)  # 8 to 16 of them; fewer below the smallest normal number
    if steps * unit > 448:
        return sign | 0x7E
    if steps == 16:
        exponent, steps = exponent + 1, 8
    if steps < 8:
        return sign | steps
    return sign | (exponent + 7) << 3 | (steps - 8)


def number(byte: int, scale: int) -> float:
    """What a byte under a scale means."""
    if byte & 0x7F == 0x7F or scale == 0xFF:
        return math.nan
    sign = -1 if byte & 0x80 else 1
    exponent, mantissa = byte >> 3 & 0xF, byte & 7
    size = Fraction(mantissa, 8) / 64 if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    value = size * Fraction(2) ** (scale - 127)
    return sign * (float(value) if value < Fraction(2) ** 128 else math.inf)


def quantize(block: Values) -> tuple[list[int], int]:
    """(bytes, scale) of one block."""
    scale = scale_of(block)
    return [e4m3(value, scale) for value in block], scale


def _floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def _nearest_even(value: Fraction) -> int:
    return round(value)  # Python rounds fractions half to even


def swizzled_index(rows: int, across: int) -> torch.Tensor:
    """Where the scale at (y, x) stands in the order that products read, by the formula of the format."""
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(across), indexing="ij")
    tile = y // 128 * -(-across // 4) + x // 4
    return tile * 512 + y % 32 * 16 + y % 128 // 32 * 4 + x % 4
