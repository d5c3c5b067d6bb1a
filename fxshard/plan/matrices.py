"""Matrices that Muon orthogonalizes: what that costs, and which rank should do it."""

from __future__ import annotations

import math
from collections.abc import Sequence

ITERATIONS = 5
"""Newton–Schulz iterations where nothing else is said."""


def matrix_cost(shape: Sequence[int]) -> int:
    """Work of a Newton–Schulz iteration on a matrix, or on each matrix of a stack, up to a constant: n² m."""
    *stack, rows, columns = shape
    small, large = sorted((rows, columns))
    return math.prod(stack) * small * small * large


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """Operations of the iterations that compute half of each symmetric product: 3 n² m + n³ each."""
    *stack, rows, columns = shape
    small, large = sorted((rows, columns))
    return math.prod(stack) * ITERATIONS * (3 * small * small * large + small**3)


def least_loaded(loads: Sequence[float]) -> int:
    """The rank with the least to do; the first of several."""
    return min(range(len(loads)), key=lambda rank: (loads[rank], rank))
