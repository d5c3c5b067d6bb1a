"""What Newton–Schulz starts from: many matrices as one bf16 batch, each divided by its Frobenius norm, now or later.

The plain form divides in fp32 before it rounds. The others round first and let the first products multiply their fp32
sums by one over the norm: a matrix is read once less. bf16 has the exponents of fp32, so both round a value once, to
the same relative precision. Magnitudes at which products of unscaled values leave the range of fp32 change nothing:

small   Norms count as ``EPS`` at least. What is lost below 2⁻¹²⁶ is below 2⁻⁷⁹ after scaling, beside a·I.
large   No entry of X·Xᵀ exceeds the squared norm, so it overflows where that does, at norms above 10¹⁹. Such a matrix
        gives zero in both ways: its norm counts as infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxshard import _compat
from fxshard.optim import elementwise, rounding
from fxshard.optim.muon_rule import momentum_

EPS = 1e-7


@dataclass(frozen=True)
class Momentum:
    """Gradients that make matrices out of momentum buffers, as ``muon_rule.momentum_`` does."""

    grads: Sequence[torch.Tensor]
    keep: float
    nesterov: bool

    def of(self, members: Sequence[int]) -> Momentum:
        """The same for some of the matrices."""
        return Momentum([self.grads[i] for i in members], self.keep, self.nesterov)


def normalized(tensors: Sequence[torch.Tensor], momentum: Momentum | None = None) -> torch.Tensor:
    """One bf16 batch of all matrices, each divided by its Frobenius norm (zero stays zero) in fp32, before rounding."""
    stacks = _made(tensors, momentum)
    batch = _empty(stacks)
    singles = _singles(stacks)
    if len({single.dtype for single in singles}) == 1 and elementwise.fits(singles):
        elementwise.normalize(singles, batch, EPS)
        return batch
    wide = [stack.float() for stack in stacks]
    start = 0
    for stack, norm in zip(wide, _norms(wide), strict=True):
        torch.div(stack, norm.view(-1, 1, 1), out=batch[start : start + len(stack)])
        start += len(stack)
    return batch


def unscaled(
    tensors: Sequence[torch.Tensor], momentum: Momentum | None = None, multiple: int = 1, kernels: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One bf16 batch of all matrices as they are, and one over the Frobenius norm of each, taken before rounding.

    Sides are padded with zeros to multiples of ``multiple``: they stay zeros in every product. ``kernels`` says that
    this is a GPU for which ``rounding`` has kernels; they give the same bits with momentum and after it.
    """
    if kernels and momentum is not None and _can_move(tensors, momentum.grads):
        batch = _empty(_stacks(tensors))
        grads, buffers = _singles(_stacks(momentum.grads)), _singles(_stacks(tensors))
        scale = rounding.moved(grads, buffers, momentum.keep, momentum.nesterov, batch, EPS)
        return _padded(batch, multiple), scale
    stacks = _made(tensors, momentum)
    batch = _empty(stacks)
    if kernels:
        # A copy, where the kernel could not read the matrix in place, does not change its sum of squares.
        readable = [one if elementwise.fits([one]) else _copied(one) for one in _singles(stacks)]
        if len({one.dtype for one in readable}) > 1:
            readable = [one.float() for one in readable]
        scale = rounding.rounded(readable, batch, EPS)
        return _padded(batch, multiple), scale
    wide = [stack.float() for stack in stacks]
    batch.copy_(torch.cat(wide))
    return _padded(batch, multiple), 1 / torch.cat(_norms(wide))


def _copied(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _made(tensors: Sequence[torch.Tensor], momentum: Momentum | None) -> list[torch.Tensor]:
    if momentum is None:
        return _stacks(tensors)
    return _stacks(momentum_(momentum.grads, tensors, momentum.keep, momentum.nesterov))


def _can_move(buffers: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel takes these. Of buffers in bf16, ``momentum_`` returns rounded sums: others than these."""
    singles = _singles(_stacks(buffers)), _singles(_stacks(grads))
    return (
        all(buffer.dtype == torch.float32 for buffer in buffers)
        and len({grad.dtype for grad in grads}) == 1
        and elementwise.fits(*singles)
    )


def _stacks(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor if tensor.ndim == 3 else tensor.unsqueeze(0) for tensor in tensors]


def _singles(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [matrix for stack in stacks for matrix in stack]


def _empty(stacks: Sequence[torch.Tensor]) -> torch.Tensor:
    count = sum(len(stack) for stack in stacks)
    return torch.empty((count, *stacks[0].shape[1:]), dtype=torch.bfloat16, device=stacks[0].device)


def _norms(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of every matrix of every stack, ``EPS`` at least. One by one: a matrix does not see its neighbours."""
    singles = _singles(stacks)
    norms = iter(_compat.foreach_norm(singles, 2.0) if singles else [])
    return [
        torch.stack([next(norms) for _ in stack]).clamp_(min=EPS) if len(stack) else stack.new_empty(0)
        for stack in stacks
    ]


def _padded(batch: torch.Tensor, multiple: int) -> torch.Tensor:
    rows, columns = batch.shape[1:]
    sides = [-(-side // multiple) * multiple for side in (rows, columns)]
    if sides == [rows, columns]:
        return batch
    padded = batch.new_zeros(len(batch), *sides)
    padded[:, :rows, :columns] = batch
    return padded
