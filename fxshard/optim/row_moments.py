"""NorMuon: after Newton–Schulz each row of a matrix is divided by the root of a running mean of its squares.

A row is what one neuron's weights move by. The matrix is then scaled so that its norm is what it was, so that learning
rates of Muon's fit. Second moments are one number for a row, in tensors of shape [..., rows, 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxshard.optim import muon_rule as rule
from fxshard.optim.config import Split

EPS = 1e-10


@torch.no_grad()
def row_factors_(
    pieces: Sequence[Sequence[torch.Tensor]],
    seconds: Sequence[torch.Tensor],
    splits: Sequence[Split | None],
    beta2: float,
    refused: torch.Tensor | None = None,
) -> list[list[torch.Tensor]]:
    """The factors of the rows of each orthogonalized matrix, as [..., rows, 1] in fp32.

    ``pieces`` are the matrices of each parameter, ``seconds`` its second moments, which are brought up to date, unless
    the number ``refused`` is there and not zero. Matrices that a parameter is cut into are scaled each by itself.
    """
    cut = [rule.split_matrices(second, split) for second, split in zip(seconds, splits, strict=True)]
    # Flat lists of single matrices. A part of a second moment may be a copy: then it is joined again below.
    matrices, moments = (
        [matrix for parts in lists for part in parts for matrix in part.reshape(-1, *part.shape[-2:])]
        for lists in (pieces, cut)
    )
    found = [_factors_(*pair, beta2, refused) for pair in zip(matrices, moments, strict=True)]
    for second, parts, split in zip(seconds, cut, splits, strict=True):
        if split is not None:
            second.copy_(rule.join_matrices(parts, split, second.shape))
    left = iter(found)
    return [
        [torch.stack([next(left) for _ in range(part.numel() // part.shape[-2])]).view(part.shape) for part in parts]
        for parts in cut
    ]


def _factors_(matrix: torch.Tensor, second: torch.Tensor, beta2: float, refused: torch.Tensor | None) -> torch.Tensor:
    """The factors of a [rows, columns]: its second moments [rows, 1] move, and 1 / √ of them is scaled to its norm."""
    rows = torch.linalg.vector_norm(matrix, dim=-1, keepdim=True, dtype=torch.float32)
    squares = rows.square() / matrix.shape[-1]
    moved = second.float().lerp(squares, 1 - beta2)
    factors = 1 / (moved.sqrt() + EPS)
    before, after = squares.sum().sqrt(), (squares * factors.square()).sum().sqrt()
    second.copy_(moved if refused is None else torch.where(refused != 0, second.float(), moved))
    return factors * (before / (after + EPS))


def scaled(pieces: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Directions in fp32, each row times its factor."""
    return [piece * factor for piece, factor in zip(pieces, factors, strict=True)]
