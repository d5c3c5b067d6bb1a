"""What became of the experts of a model: which were fused and how, which were not and why."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fused:
    """Experts that are one operator now."""

    where: str
    implementation: str
    form: str

    def __str__(self) -> str:
        return f"fused by {self.implementation}: {self.form}"


@dataclass(frozen=True)
class Left:
    """Something that looks like experts (or a part of them) and was left as it was written."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"left alone: {self.reason}"


@dataclass
class ExpertsReport:
    """What ``fxshard.explain`` returns; ``print`` it.

    >>> report = fxshard.explain(model, (tokens, targets))
    >>> report.fused[0].implementation
    'torch'
    """

    fused: list[Fused] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def __str__(self) -> str:
        lines: dict[str, list[str]] = {}
        entries: list[Fused | Left] = [*self.fused, *self.left]
        for entry in entries:
            lines.setdefault(str(entry), []).append(entry.where)
        if not lines:
            return "no experts found: no grouped product and no loop over gated MLPs"
        return "\n".join(f"{_places(where)} {what}" for what, where in lines.items())


def _places(where: list[str]) -> str:
    return where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more"
