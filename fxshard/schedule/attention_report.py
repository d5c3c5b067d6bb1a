"""A report on the attention masks of a model: causal ones, windows, empty ones, and those kept and why."""

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
class UnmaskedCall:
    """A call whose mask hid nothing, and which has none now."""

    where: str

    def __str__(self) -> str:
        return "a mask that hides nothing, left out"


@dataclass(frozen=True)
class WindowCall:
    """A call whose mask let each query see a range of keys, and which reads these instead of a mask."""

    where: str
    window: int | None
    """How many keys a query sees at most; None: all before it."""
    documents: bool
    """Whether it sees only its own document, of several in a row."""
    padding: bool = False
    """Whether keys are hidden from all queries, by a mask of keys."""
    ahead: int | None = 0
    """How many keys after its own it sees at most; None: all."""

    def __str__(self) -> str:
        window = f"a window of {self.window}" if self.window is not None else ""
        window += f" and {self.ahead} after it" if self.ahead else ""
        data = "documents" if self.documents else "padding" if self.padding else ""
        return f"{' and '.join(part for part in (data, window) if part)}, without a mask of queries and keys"


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
    unmasked: list[UnmaskedCall] = field(default_factory=list)
    windows: list[WindowCall] = field(default_factory=list)
    masked: list[MaskedCall] = field(default_factory=list)

    @property
    def found(self) -> list[CausalCall | UnmaskedCall | WindowCall | MaskedCall]:
        return [*self.causal, *self.unmasked, *self.windows, *self.masked]

    def __str__(self) -> str:
        lines = [f"{places}: {what}" for places, what in by_place(self.found)]
        return "\n".join(lines) or "no attention with a mask found"
