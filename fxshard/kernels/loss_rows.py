"""Cross-entropy of rows of logits, and its gradient in their place: what a chunk of tokens needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxshard.kernels.ops import has_triton


@dataclass(frozen=True)
class Cap:
    """What becomes of a product before the loss: ``outer · tanh(inner · x)`` with ``tanh``, else ``inner · x``."""

    inner: float = 1.0
    tanh: bool = False
    outer: float = 1.0


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that losses and sums are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_loss(
    logits: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor, cap: Cap, *, gradient: bool
) -> torch.Tensor:
    """The loss of each row; 0 where ``counts``, a mask, is False. With ``gradient``, ``logits`` hold it afterwards.

    ``labels`` of rows that do not count may be any class.
    """
    picked = logits.gather(1, labels.unsqueeze(1)).squeeze(1)  # which also checks that labels are classes
    if logits.is_cuda and logits.dtype != torch.float64 and has_triton():
        from fxshard.kernels.loss_kernels import rows_loss as by_triton  # Triton is not everywhere

        return by_triton(logits, labels, picked, counts, cap, gradient=gradient)
    return _by_torch(logits, labels, picked, counts, cap, gradient=gradient)


def _by_torch(
    logits: torch.Tensor, labels: torch.Tensor, picked: torch.Tensor, counts: torch.Tensor, cap: Cap, *, gradient: bool
) -> torch.Tensor:
    dtype = wide(logits.dtype)
    capped, slope = _capped(logits.to(dtype), cap)
    log_sum = capped.logsumexp(1)
    losses = torch.where(counts, log_sum - _capped(picked.to(dtype), cap)[0], 0.0)
    if gradient:
        grad = torch.exp(capped - log_sum.unsqueeze(1))
        grad.scatter_add_(1, labels.unsqueeze(1), torch.full_like(losses, -1.0).unsqueeze(1))
        grad *= slope
        logits.copy_(torch.where(counts.unsqueeze(1), grad, 0.0))
    return losses


def _capped(x: torch.Tensor, cap: Cap) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Capped logits, and by how much they change with ``x``."""
    if not cap.tanh:
        return x * cap.inner, cap.inner
    tanh = torch.tanh(x * cap.inner)
    return tanh * cap.outer, (1 - tanh * tanh) * (cap.inner * cap.outer)
