"""Momentum and update as one pass over memory each, in Triton. ``muon_rule`` uses them where it can."""

from __future__ import annotations

from collections.abc import Sequence

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # torch for the CPU comes without Triton
    HAS_TRITON = False

_BLOCK = 4096


def fits(*lists: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take these tensors: on a GPU, contiguous, addressable with 32 bits."""
    return HAS_TRITON and all(
        tensor.is_cuda and tensor.is_contiguous() and tensor.numel() < 2**31 - _BLOCK
        for tensors in lists
        for tensor in tensors
    )


if HAS_TRITON:

    @triton.jit
    def _momentum_kernel(grad, momentum, update, size, keep, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):
        where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = where < size
        g = tl.load(grad + where, mask=inside).to(tl.float32)
        m = tl.load(momentum + where, mask=inside).to(tl.float32)
        m += (1 - keep) * (g - m)
        tl.store(momentum + where, m, mask=inside)
        if NESTEROV:
            tl.store(update + where, m - (m - g) * (1 - keep), mask=inside)

    @triton.jit
    def _update_kernel(param, direction, size, keep, rate, BLOCK: tl.constexpr):
        where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = where < size
        p = tl.load(param + where, mask=inside).to(tl.float32)
        d = tl.load(direction + where, mask=inside).to(tl.float32)
        tl.store(param + where, p * keep - rate * d, mask=inside)


def momentum_(
    grads: Sequence[torch.Tensor], momenta: Sequence[torch.Tensor], momentum: float, nesterov: bool
) -> list[torch.Tensor]:
    """See ``muon_rule.momentum_``."""
    updates = []
    for grad, buffer in zip(grads, momenta, strict=True):
        update = torch.empty_like(buffer) if nesterov else buffer
        if size := grad.numel():
            grid = (triton.cdiv(size, _BLOCK),)
            _momentum_kernel[grid](grad, buffer, update, size, momentum, NESTEROV=nesterov, BLOCK=_BLOCK, num_warps=8)
        updates.append(update)
    return updates


def apply_(
    params: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    lr: float,
    weight_decay: float,
    factors: Sequence[float],
) -> None:
    """See ``muon_rule.apply_``."""
    for parameter, direction, factor in zip(params, directions, factors, strict=True):
        if size := parameter.numel():
            grid = (triton.cdiv(size, _BLOCK),)
            _update_kernel[grid](
                parameter, direction, size, 1 - lr * weight_decay, lr * factor, BLOCK=_BLOCK, num_warps=8
            )
