"""What became of the attention masks of a model: which were causal, which were kept and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxshard.kernels.report import by_place


@dataclass(frozen=True)
class CausalCall:
    """A call whose mask was the causal one, and which says so now instead of reading a mask."""

    where: str
    grouped: bool
    """Whether it takes key and value heads as they are, without a copy for every query head."""

    def __str__(self) -> str:
        return f"causal, without a mask{', key and value heads not repeated' if self.grouped else ''}"


@dataclass(frozen=True)
class MaskedCall:
    """A call that keeps its mask."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"keeps its mask, which {self.reason}"


@dataclass
class AttentionReport:
    """The calls of ``scaled_dot_product_attention`` that were written with a mask; ``print`` it."""

    causal: list[CausalCall] = field(default_factory=list)
    masked: list[MaskedCall] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{places}: {what}" for places, what in by_place([*self.causal, *self.masked])]
        return "\n".join(lines) or "no attention with a mask found"
