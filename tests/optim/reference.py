"""What Muon is meant to compute, in fp64 and by singular values: no product of matrices is taken from the package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxshard.optim.coefficients import triples


def images(values: torch.Tensor, coefficients: str, steps: int) -> torch.Tensor:
    """Where the iteration sends singular values."""
    values = values.double()
    for a, b, c in triples(coefficients, steps):
        values = a * values + b * values**3 + c * values**5
    return values


def orthogonalized(matrix: torch.Tensor, coefficients: str = "quintic", steps: int = 5) -> torch.Tensor:
    """U·p(S)·Vᵀ of the matrix divided by its Frobenius norm."""
    exact = matrix.double()
    u, s, vt = torch.linalg.svd(exact / exact.norm().clamp(min=1e-7), full_matrices=False)
    return u @ torch.diag(images(s, coefficients, steps)) @ vt


def check_steps(
    ours: torch.optim.Optimizer, torchs: torch.optim.Optimizer, mine: Sequence[Tensor], theirs: Sequence[Tensor]
) -> None:
    """Four steps of both on the same gradients. torch normalises after rounding to bf16, so the last bits differ."""
    start = [value.detach().clone() for value in theirs]
    for _ in range(4):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        ours.step()
        torchs.step()
    for one, other, before in zip(mine, theirs, start, strict=True):
        assert (one - other).norm() < 0.03 * (other - before).norm()


def distance(mine: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((mine.double() - exact.double()).norm() / exact.double().norm())
