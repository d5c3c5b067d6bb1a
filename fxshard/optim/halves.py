"""The products of Newton–Schulz in plain torch: what ``symmetric`` computes on a Hopper, on any device.

One matrix at a time, so that no library chooses an algorithm by the size of a batch.
"""

from __future__ import annotations

import torch

_ROWS = 256


def multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    add: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    """alpha·left·right + beta·add, multiplied in bf16, summed in fp32 and rounded once.

    On a CPU in fp32: bf16 values multiply exactly there, and many CPUs have no fast product of bf16 matrices.
    """
    if left.device.type == "cpu":
        wide = (
            left.float() @ right.float()
            if add is None
            else torch.addmm(add.float(), left.float(), right.float(), alpha=alpha, beta=beta)
        )
        return wide.to(left.dtype)
    return left @ right if add is None else torch.addmm(add, left, right, alpha=alpha, beta=beta)


def scaled(left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor, times: int) -> torch.Tensor:
    """left·right, multiplied ``times`` times by the number ``scale`` in fp32, rounded once. Zero if the number is."""
    if left.device.type == "cpu":
        wide = left.float() @ right.float()
    else:
        wide = torch.mm(left, right, out_dtype=torch.float32)
    for _ in range(times):
        wide = wide * scale
    return torch.where(scale == 0, 0.0, wide).to(left.dtype)


def symmetric_product(
    left: torch.Tensor, right: torch.Tensor, *, tall: bool = False, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """left·rightᵀ (of ``tall`` matrices: leftᵀ·right), known to be symmetric: up to the diagonal, and mirrored.

    With ``scale``, one fp32 number for each matrix of the batch, it is the product of both times that number.
    """
    if tall:
        left, right = left.mT, right.mT
    out = left.new_empty(left.shape[0], left.shape[1], left.shape[1])
    for i, (one, x, y) in enumerate(zip(out, left, right, strict=True)):
        for begin in range(0, len(x), _ROWS):
            end = min(begin + _ROWS, len(x))
            rows, columns = x[begin:end], y[:end].mT
            one[begin:end, :end] = multiply(rows, columns) if scale is None else scaled(rows, columns, scale[i], 2)
            one[:begin, begin:end] = one[begin:end, :begin].mT
    return out


def polynomial(matrix: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
    """a·I + b·A + c·A² of symmetric matrices, rounded once."""
    out = torch.empty_like(matrix)
    for one, x in zip(out, matrix, strict=True):
        wide = x.float()
        for begin in range(0, len(x), _ROWS):
            end = min(begin + _ROWS, len(x))
            rows = torch.addmm(wide[begin:end, :end], wide[begin:end], wide[:, :end], beta=b, alpha=c)
            rows[:, begin:end].diagonal().add_(a)
            one[begin:end, :end] = rows
            one[:begin, begin:end] = one[begin:end, :begin].mT
    return out


def product(
    factor: torch.Tensor, matrix: torch.Tensor, *, tall: bool = False, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """factor·matrix (of ``tall`` matrices: matrix·factor), times ``scale``."""
    pairs = [(x, f) if tall else (f, x) for f, x in zip(factor, matrix, strict=True)]
    if scale is None:
        return torch.stack([multiply(x, y) for x, y in pairs])
    return torch.stack([scaled(x, y, one, 1) for (x, y), one in zip(pairs, scale, strict=True)])
