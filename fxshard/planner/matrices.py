"""Matrices that Muon orthogonalizes: what that costs, and which rank should do it."""

from __future__ import annotations

import math
from collections.abc import Sequence

GRAM_RATIO = 1.5
"""From this ratio of the sides on, the gram form of Newton–Schulz multiplies less than the symmetric one."""
ITERATIONS = 5
"""Newton–Schulz iterations where nothing else is said."""


def matrix_cost(shape: Sequence[int]) -> int:
    """Work of a Newton–Schulz iteration on a matrix, or on each matrix of a stack, up to a constant: n² m."""
    *stack, rows, columns = shape
    small, large = sorted((rows, columns))
    return math.prod(stack) * small * small * large


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """Operations of Newton–Schulz in the form that GPU kernels compute: half of each symmetric product.

    Each iteration takes 3 n² m + n³; from ``GRAM_RATIO`` on all of them run on the small gram matrix, with one restart:
    6 n² m + 14 n³ in all.
    """
    *stack, rows, columns = shape
    small, large = sorted((rows, columns))
    symmetric = ITERATIONS * (3 * small * small * large + small**3)
    gram = 6 * small * small * large + 14 * small**3
    return math.prod(stack) * (gram if large > GRAM_RATIO * small else symmetric)


def least_loaded(loads: Sequence[float]) -> int:
    """The rank with the least to do; the first of several."""
    return min(range(len(loads)), key=lambda rank: (loads[rank], rank))
