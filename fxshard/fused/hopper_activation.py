"""The activation and its derivative as PTX, two values at a time.

Left to a compiler, a tile of such formulas takes more registers than products that run at the same time leave it.
"""

from __future__ import annotations

import math
import struct
from functools import cache

from fxshard.fused.glu import Glu


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


@cache
def derivative(glu: Glu) -> str:
    """Gradients of gate and up ($0, $1) and the activation ($2) from gate, up and its gradient ($3, $4, $5)."""
    lines = ["{ .reg .b32 g<2>, u<2>, d<2>, s, t, x<2>, y<2>; .reg .pred p;"]
    lines += [_unpacked(f"${3 + i}", f"{name}0", f"{name}1") for i, name in enumerate("gud")]
    zero = _number(0.0)
    for i in range(2):
        g, u, d, x, y = (f"{name}{i}" for name in "gudxy")
        # x and y keep what gate and up were before they are clamped.
        lines += [f"mov.b32 {x}, {g}; mov.b32 {y}, {u};"] if glu.limit != math.inf else []
        lines += [_gate(g, "s", glu), _up(u, glu)]
        lines += [f"mul.f32 {g}, {g}, s;"]  # a
        lines += [f"mul.f32 t, {g}, {_number(glu.alpha)};"]  # s + alpha·a·(1 - s)
        slope = "{ .reg .b32 r; " + f"sub.f32 r, {_number(1.0)}, s; fma.rn.f32 s, t, r, s;" + " }"
        lines += [slope, f"mul.f32 t, {d}, {u}; mul.f32 s, t, s;"]  # of gate
        lines += [f"mul.f32 t, {d}, {g};", f"mul.f32 {d}, {g}, {u};"]  # of up; the activation
        if glu.limit != math.inf:
            limits = f"setp.le.f32 p, {x}, {_number(glu.limit)}; selp.b32 s, s, {zero}, p;"
            lines += [limits, f"abs.f32 {y}, {y}; setp.le.f32 p, {y}, {_number(glu.limit)}; selp.b32 t, t, {zero}, p;"]
        lines += [f"mov.b32 {x}, s; mov.b32 {y}, t;"]
    results = "cvt.rn.bf16x2.f32 $0, x1, x0; cvt.rn.bf16x2.f32 $1, y1, y0; cvt.rn.bf16x2.f32 $2, d1, d0; }"
    return " ".join([*lines, results])
