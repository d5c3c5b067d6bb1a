"""How products run in float8: what a plan, a graph and the runtime need to know of ``fxshard.Float8``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxshard.kernels.float8 import BLOCK, E4M3, E5M2, ROWWISE, Scaling


@dataclass(frozen=True)
class Float8Recipe:
    """Weights and activations are E4M3."""

    scaling: Scaling
    quantized_wgrad: bool = True
    """Whether weight gradients are products of float8 values; otherwise of bf16."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of output gradients. One scale for all of them leaves more to the exponent."""
        return E5M2 if self.scaling is Scaling.TENSOR else E4M3

    @property
    def cut(self) -> int:
        """Rows of a weight that stay on one rank, so that every owner quantizes alone."""
        return BLOCK if self.scaling is Scaling.BLOCK else 1

    @property
    def copies(self) -> int:
        """How often a weight is quantized: products that sum over its rows need scales of columns, if of either."""
        return 2 if self.scaling is Scaling.ROW else 1

    def axis(self, axis: int) -> int:
        """Which copy of a weight a product reads that sums over ``axis``."""
        return axis if self.copies == 2 else ROWWISE

    def fast(self, *, forward: bool) -> bool:
        """Whether the hardware may keep sums in fewer bits for longer."""
        return forward or self.scaling is not Scaling.TENSOR
