"""Newton–Schulz: the orthogonal factor of many matrices at once, nearly.

Each matrix is normalised in fp32 and multiplied in bf16. What comes out for one matrix does not depend on which others
are given with it: no product is chosen by the number of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxshard.errors import ConfigError
from fxshard.optim.coefficients import Triple, triples

EPS = 1e-7


@torch.no_grad()
def orthogonalize(
    matrices: Sequence[torch.Tensor],
    *,
    steps: int = 5,
    coefficients: str = "quintic",
    form: str = "auto",
    max_batch_bytes: int = 2**31,
) -> list[torch.Tensor]:
    """For each [rows, columns] or [batch, rows, columns], a bf16 tensor of its shape with singular values near one.

    Matrices of equal size run as one batch, of at most ``max_batch_bytes`` of bf16 (or one tensor, if that is more).
    """
    polynomial = triples(coefficients, steps)
    results: list[torch.Tensor] = [None] * len(matrices)  # type: ignore[list-item]
    for matrix in matrices:
        if matrix.ndim not in (2, 3):
            raise ConfigError(
                f"orthogonalize: a tensor of shape {list(matrix.shape)} is neither a matrix nor a batch of them"
            )
    for i, matrix in enumerate(matrices):
        wide = _wide(matrix)
        out = torch.stack([_plain(x, polynomial) for x in normalized(wide)]) if wide.numel() else wide.bfloat16()
        results[i] = (out.mT if matrix.shape[-2] > matrix.shape[-1] else out).reshape(matrix.shape)
    return results


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    batch = matrix if matrix.ndim == 3 else matrix.unsqueeze(0)
    return batch.mT if matrix.shape[-2] > matrix.shape[-1] else batch


def normalized(batch: torch.Tensor) -> torch.Tensor:
    """bf16 matrices of Frobenius norm one (zero stays zero); the norm is taken in fp32, before rounding."""
    batch = batch.float()
    norms = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True)
    return (batch / norms.clamp(min=EPS)).bfloat16()


def _plain(x: torch.Tensor, polynomial: Sequence[Triple]) -> torch.Tensor:
    for a, b, c in polynomial:
        gram = x @ x.mT
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x
