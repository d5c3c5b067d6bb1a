"""What Muon is meant to compute, in fp64 and by singular values: no product of matrices is taken from the package."""

from __future__ import annotations

import torch

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


def distance(mine: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((mine.double() - exact.double()).norm() / exact.double().norm())
