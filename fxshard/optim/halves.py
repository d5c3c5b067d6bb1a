"""The products of Newton–Schulz in plain torch: what ``symmetric`` computes on a Hopper, on any device.

One matrix at a time, so that no library chooses an algorithm by the size of a batch.
"""

from __future__ import annotations

import torch

_ROWS = 256


def symmetric_product(left: torch.Tensor, right: torch.Tensor, *, tall: bool = False) -> torch.Tensor:
    """left·rightᵀ (of ``tall`` matrices: leftᵀ·right), known to be symmetric: up to the diagonal, and mirrored."""
    if tall:
        left, right = left.mT, right.mT
    out = left.new_empty(left.shape[0], left.shape[1], left.shape[1])
    for one, x, y in zip(out, left, right, strict=True):
        for begin in range(0, len(x), _ROWS):
            end = min(begin + _ROWS, len(x))
            one[begin:end, :end] = x[begin:end] @ y[:end].mT
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


def product(factor: torch.Tensor, matrix: torch.Tensor, *, tall: bool = False) -> torch.Tensor:
    """factor·matrix (of ``tall`` matrices: matrix·factor)."""
    pairs = zip(factor, matrix, strict=True)
    return torch.stack([x @ f if tall else f @ x for f, x in pairs])
