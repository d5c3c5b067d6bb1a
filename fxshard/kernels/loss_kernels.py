# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""``loss_rows`` as one Triton kernel: logits are read twice, the second time from cache, and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fxshard.kernels.launch import Launches, pointers
from fxshard.kernels.loss_rows import Cap

BLOCK = 4096
WARPS = 8


def rows_loss(
    logits: torch.Tensor, labels: torch.Tensor, picked: torch.Tensor, counts: torch.Tensor, cap: Cap, *, gradient: bool
) -> torch.Tensor:
    """See ``loss_rows.rows_loss``; ``picked`` are the logits of the labels."""
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        constants = (classes, cap.inner, cap.outer, cap.tanh, gradient, BLOCK)
        tensors = (logits, labels, picked, counts, losses)
        key = (constants, logits.stride(0), pointers(*tensors), logits.device)
        _launches(key, (rows, 1, 1), (*tensors, logits.stride(0), *constants))
    return losses


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _capped(x, INNER: tl.constexpr, OUTER: tl.constexpr, TANH: tl.constexpr):
    x = x.to(tl.float32) * INNER
    if TANH:
        x = _tanh(x) * OUTER
    return x


@triton.jit
def _rows(
    logits,
    labels,
    picked,
    counts,
    losses,
    stride,
    CLASSES: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    TANH: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * stride
    column = tl.arange(0, BLOCK)
    if tl.load(counts + row) == 0:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, CLASSES, BLOCK):
                inside = start + column < CLASSES
                tl.store(own + start + column, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=inside)
        return

    # Each lane keeps the largest logit it has met and the sum of exponentials relative to that one.
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CLASSES, BLOCK):
        inside = start + column < CLASSES
        x = _capped(tl.load(own + start + column, mask=inside, other=0.0), INNER, OUTER, TANH)
        x = tl.where(inside, x, -float("inf"))
        new = tl.where(x > largest, x, largest)
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = new
    top = tl.max(largest, 0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    log_sum = shift + tl.log(tl.sum(total * tl.exp(largest - shift), 0))
    tl.store(losses + row, log_sum - _capped(tl.load(picked + row), INNER, OUTER, TANH))

    if GRADIENT:
        label = tl.load(labels + row)
        for start in range(0, CLASSES, BLOCK):
            inside = start + column < CLASSES
            x = tl.load(own + start + column, mask=inside, other=0.0).to(tl.float32) * INNER
            if TANH:
                tanh = _tanh(x)
                grad = tl.exp(tanh * OUTER - log_sum) - tl.where(start + column == label, 1.0, 0.0)
                grad = grad * (1 - tanh * tanh) * (INNER * OUTER)
            else:
                grad = (tl.exp(x - log_sum) - tl.where(start + column == label, 1.0, 0.0)) * INNER
            tl.store(own + start + column, grad.to(logits.dtype.element_ty), mask=inside)


_launches = Launches(_rows, num_warps=WARPS)
