"""The activation as PTX, two values at a time.

Left to a compiler, a tile of it takes more registers than products that run at the same time leave it.
"""

from __future__ import annotations

import math
import struct
from functools import cache

from fxshard.kernels.glu import Glu


def _number(value: float) -> str:
    """A constant as PTX writes it."""
    return "0f" + struct.pack(">f", value).hex()


def _unpacked(source: str, low: str, high: str) -> str:
    """Two bf16 in one register, as two fp32."""
    return f"shl.b32 {low}, {source}, 16; and.b32 {high}, {source}, 0xffff0000;"


def _gate(g: str, s: str, glu: Glu) -> str:
    """g clamped, and s = sigmoid(alpha·g), with the instructions that Triton has for these."""
    lines = [f"min.f32 {g}, {g}, {_number(glu.limit)};"] if glu.limit != math.inf else []
    lines += [f"mul.f32 {s}, {g}, {_number(-glu.alpha)};", f"mul.f32 {s}, {s}, {_number(1.4426950408889634)};"]
    lines += [f"ex2.approx.f32 {s}, {s};", f"add.f32 {s}, {s}, {_number(1.0)};"]
    return " ".join([*lines, f"div.full.f32 {s}, {_number(1.0)}, {s};"])


def _up(u: str, glu: Glu) -> str:
    """u clamped, plus the offset."""
    lines = []
    if glu.limit != math.inf:
        lines += [f"max.f32 {u}, {u}, {_number(-glu.limit)};", f"min.f32 {u}, {u}, {_number(glu.limit)};"]
    return " ".join([*lines, f"add.f32 {u}, {u}, {_number(glu.offset)};" if glu.offset else ""])


@cache
def activation(glu: Glu, weighted: bool) -> str:
    """Two values of the activation ($0) from two of gate ($1) and up ($2), and their rows' weights ($3, $4)."""
    lines = ["{ .reg .b32 g<2>, u<2>, s;", _unpacked("$1", "g0", "g1"), _unpacked("$2", "u0", "u1")]
    for i in range(2):
        lines += [_gate(f"g{i}", "s", glu), _up(f"u{i}", glu)]
        lines += [f"mul.f32 g{i}, g{i}, s;", f"mul.f32 g{i}, g{i}, u{i};"]
        lines += [f"mul.f32 g{i}, g{i}, ${3 + i};"] if weighted else []
    return " ".join([*lines, "cvt.rn.bf16x2.f32 $0, g1, g0; }"])
