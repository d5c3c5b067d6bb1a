"""How the parameters of a bucket travel and rest, and how products with them run in float8."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from fxshard.kernels.float8 import BLOCK, E4M3, E5M2, ROWWISE, Scaling


class Gather(StrEnum):
    """What a gather of a bucket moves, and which ranks quantize it."""

    PLAIN = "plain"
    """Nothing is quantized: the compute dtype travels."""
    OFF = "off"
    """bf16 travels, and the graph quantizes where it multiplies: the reference that the others must equal."""
    STAGED = "staged"
    """bf16 travels through a staging buffer, every rank quantizes it once, both copies stay (ZeRO 0 to 2)."""
    DIRECT = "direct"
    """Owners quantize, and copies travel: the one that is read, of what stays in memory all of them (float8 only)."""


class Copies(StrEnum):
    """The quantized copies that a gather of a ``DIRECT`` bucket brings."""

    NONE = ""
    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"
    BOTH = "both"

    @property
    def rowwise(self) -> bool:
        return self in (Copies.ROWWISE, Copies.BOTH)

    @property
    def columnwise(self) -> bool:
        return self in (Copies.COLUMNWISE, Copies.BOTH)

    @property
    def number(self) -> int:
        return self.rowwise + self.columnwise

    def covers(self, wanted: Copies) -> bool:
        """Whether all that is wanted is among these."""
        return self.rowwise >= wanted.rowwise and self.columnwise >= wanted.columnwise


def copies(*, rowwise: bool, columnwise: bool) -> Copies:
    if rowwise:
        return Copies.BOTH if columnwise else Copies.ROWWISE
    return Copies.COLUMNWISE if columnwise else Copies.NONE


@dataclass(frozen=True)
class Float8Recipe:
    """Weights and activations are E4M3."""

    scaling: Scaling
    quantized_wgrad: bool = True
    """Whether weight gradients are products of float8 values; otherwise of bf16."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of output gradients. One scale for all of them leaves more to the exponent."""
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
        """The copy of a weight that a product summing over ``axis`` reads."""
        return axis if self.copies == 2 else ROWWISE

    def fast(self, *, forward: bool) -> bool:
        """Whether the hardware may keep sums in fewer bits for longer."""
        return forward or self.scaling is not Scaling.TENSOR
