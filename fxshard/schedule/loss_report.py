"""A report on the losses of a model: those that are computed in chunks, without logits, and why others are not."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxshard.kernels.report import by_place
from fxshard.schedule.schedule import size


@dataclass(frozen=True)
class ChunkedLoss:
    """A head and its loss that are one operator over chunks of tokens."""

    where: str
    rows: int
    """Tokens whose logits exist at a time, at most."""
    logits_bytes: int
    """Bytes that the logits would have taken, once, in the dtype of the head's product."""

    def __str__(self) -> str:
        return f"loss in chunks of {self.rows} tokens, without {size(self.logits_bytes)} of logits"


@dataclass(frozen=True)
class FullLoss:
    """A call of ``cross_entropy`` that reads its logits."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"loss from full logits: {self.reason}"


@dataclass
class LossReport:
    """The calls of ``cross_entropy`` in a model; ``print`` it."""

    chunked: list[ChunkedLoss] = field(default_factory=list)
    full: list[FullLoss] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{places}: {what}" for places, what in by_place([*self.chunked, *self.full])]
        return "\n".join(lines) or "no cross-entropy found"
