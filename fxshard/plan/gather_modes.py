"""How the parameters of a bucket travel and rest."""

from __future__ import annotations

from enum import StrEnum


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
    """Which quantized copies a gather of a ``DIRECT`` bucket brings."""

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
