"""The start of Newton–Schulz: many matrices as one bf16 batch, each divided by its Frobenius norm, now or later.

The plain form divides in fp32 before it rounds. The others round first and let the first products multiply their fp32
sums by one over the norm: a matrix is read once less. bf16 has the exponents of fp32, so both round a value once, to
the same relative precision. Magnitudes at which products of unscaled values leave the range of fp32 change nothing:

small   Norms count as ``EPS`` at least. What is lost below 2⁻¹²⁶ is below 2⁻⁷⁹ after scaling, added to a·I.
large   No entry of X·Xᵀ exceeds the squared norm, so it overflows where that does, at norms above 10¹⁹. Such a matrix
        gives zero in both ways: its norm counts as infinite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxshard._torch import private
from fxshard.optim import elementwise, rounding

EPS = 1e-7


def normalized(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One bf16 batch of all matrices, each divided by its Frobenius norm (zero stays zero) in fp32, before rounding."""
    singles = _singles(tensors)
    batch = _empty(tensors[0], len(singles))
    wide = [single.float() for single in singles]
    for one, matrix, norm in zip(batch, wide, _norms(wide, batch.device), strict=True):
        torch.div(matrix, norm, out=one)
    return batch


def unscaled(
    tensors: Sequence[torch.Tensor], multiple: int = 1, kernels: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One bf16 batch of all matrices as they are, and one over the Frobenius norm of each, taken before rounding.

    Sides are padded with zeros to multiples of ``multiple``: they stay zeros in every product. ``kernels`` says that
    this is a GPU for which ``rounding`` has kernels.
    """
    singles = _singles(tensors)
    batch = _empty(tensors[0], len(singles))
    if kernels:
        # A copy, where the kernel could not read the matrix in place, does not change its sum of squares.
        readable = [one if elementwise.fits([one]) else _copied(one) for one in singles]
        if len({one.dtype for one in readable}) > 1:
            readable = [one.float() for one in readable]
        scale = rounding.rounded(readable, batch, EPS)
    else:
        wide = [single.float() for single in singles]
        for one, matrix in zip(batch, wide, strict=True):
            one.copy_(matrix)
        scale = 1 / _norms(wide, batch.device)
    return _padded(batch, multiple), scale


def _copied(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _singles(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Before the first launch of a step the device waits for the host: no views where none are needed.
    return [one for tensor in tensors for one in (tensor if tensor.ndim == 3 else (tensor,))]


def _empty(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty((count, *like.shape[-2:]), dtype=torch.bfloat16, device=like.device)


def _norms(matrices: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of every matrix, ``EPS`` at least."""
    if not matrices:
        return torch.empty(0, device=device)
    return torch.stack(private.foreach_norm(list(matrices), 2.0)).clamp_(min=EPS)


def _padded(batch: torch.Tensor, multiple: int) -> torch.Tensor:
    rows, columns = batch.shape[1:]
    sides = [-(-side // multiple) * multiple for side in (rows, columns)]
    if sides == [rows, columns]:
        return batch
    padded = batch.new_zeros(len(batch), *sides)
    padded[:, :rows, :columns] = batch
    return padded
