# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""The activation and its derivative as one Triton kernel each: every value is read once and written once."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fxshard.kernels.glu import Glu
from fxshard.kernels.launch import Launches, pointers

BLOCK = 1024


def activate(pre: torch.Tensor, pre_up: torch.Tensor | None, weights: torch.Tensor | None, glu: Glu) -> torch.Tensor:
    """``glu.activate`` on a joined projection (``pre_up`` None) or on two."""
    gate, up, inner = _halves(pre, pre_up, glu)
    hidden = pre.new_empty(pre.shape[0], inner)
    if hidden.numel():
        grid = (pre.shape[0], -(-inner // BLOCK), 1)
        _launch(_activations, grid, (gate, up, weights, hidden), (inner, gate.stride(0), up.stride(0)), glu, pre.device)
    return hidden


def differentiate(
    pre: torch.Tensor, pre_up: torch.Tensor | None, weights: torch.Tensor | None, grad: torch.Tensor, glu: Glu
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``glu.differentiate``: gradients in the layout of the projections, the activation, the routing weights'."""
    gate, up, inner = _halves(pre, pre_up, glu)
    grad = grad.contiguous()
    grad_pre = torch.empty_like(pre)
    grad_pre_up = torch.empty_like(pre_up) if pre_up is not None else None
    grad_gate, grad_up, _ = _halves(grad_pre, grad_pre_up, glu)
    hidden = pre.new_empty(pre.shape[0], inner)
    grad_weights = (
        pre.new_empty(0) if weights is None else torch.empty_like(weights, memory_format=torch.contiguous_format)
    )
    if hidden.numel():
        tensors = (gate, up, weights, grad, grad_gate, grad_up, hidden, grad_weights)
        _launch(_derivatives, (pre.shape[0], 1, 1), tensors, (inner, gate.stride(0), up.stride(0)), glu, pre.device)
    return grad_pre, grad_pre_up if grad_pre_up is not None else pre.new_empty(0), hidden, grad_weights


def _halves(pre: torch.Tensor, pre_up: torch.Tensor | None, glu: Glu) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Where gate and up begin; the kernels step over the other's columns."""
    if pre_up is not None:
        return pre, pre_up, pre.shape[1]
    inner = pre.shape[1] // 2
    return pre, pre[:, glu.interleave or inner :], inner


def _launch(
    launches: Launches,
    grid: tuple[int, int, int],
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[int, int, int],
    glu: Glu,
    device: torch.device,
) -> None:
    clamped = glu.limit != math.inf
    limit = glu.limit if clamped else 0.0
    # The third of the tensors are the routing weights.
    constants = (glu.alpha, limit, clamped, glu.offset, glu.interleave, tensors[2] is not None, BLOCK)
    key = (constants, numbers, pointers(*tensors), device)
    launches(key, grid, (*tensors, *numbers, *constants))


@triton.jit
def _column(n, INTERLEAVE: tl.constexpr):
    if INTERLEAVE == 0:
        return n
    else:
        return (n // INTERLEAVE) * (2 * INTERLEAVE) + n % INTERLEAVE


@triton.jit
def _activate(
    gate,
    up,
    weights,
    hidden,
    inner,
    gate_stride,
    up_stride,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CLAMPED: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < inner
    column = _column(n, INTERLEAVE)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if CLAMPED:
        g = tl.minimum(g, LIMIT)
        u = tl.minimum(tl.maximum(u, -LIMIT), LIMIT)
    h = g * tl.sigmoid(ALPHA * g) * (u + OFFSET)
    if WEIGHTED:
        h = h * tl.load(weights + row).to(tl.float32)
    tl.store(hidden + row * inner + n, h.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _differentiate(
    gate,
    up,
    weights,
    grad,
    grad_gate,
    grad_up,
    hidden,
    grad_weights,
    inner,
    gate_stride,
    up_stride,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CLAMPED: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if WEIGHTED:
        scale = tl.load(weights + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        n = start + tl.arange(0, BLOCK)
        inside = n < inner
        column = _column(n, INTERLEAVE)
        gate_in = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        up_in = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        dh = tl.load(grad + row * inner + n, mask=inside, other=0.0).to(tl.float32)
        g = gate_in
        u = up_in
        if CLAMPED:
            g = tl.minimum(g, LIMIT)
            u = tl.minimum(tl.maximum(u, -LIMIT), LIMIT)
        u = u + OFFSET
        s = tl.sigmoid(ALPHA * g)
        a = g * s
        total += dh * a * u
        dh = dh * scale
        dg = dh * u * (s + ALPHA * a * (1.0 - s))
        du = dh * a
        if CLAMPED:
            dg = tl.where(gate_in <= LIMIT, dg, 0.0)
            du = tl.where(tl.abs(up_in) <= LIMIT, du, 0.0)
        tl.store(grad_gate + row * gate_stride + column, dg.to(grad_gate.dtype.element_ty), mask=inside)
        tl.store(grad_up + row * up_stride + column, du.to(grad_up.dtype.element_ty), mask=inside)
        tl.store(hidden + row * inner + n, (a * u * scale).to(hidden.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + row, tl.sum(total).to(grad_weights.dtype.element_ty))


_activations, _derivatives = Launches(_activate), Launches(_differentiate)
