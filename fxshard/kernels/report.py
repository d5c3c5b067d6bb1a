"""What became of the experts of a model: which were fused and how, which were not and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Fused:
    """Experts that are one operator now."""

    where: str
    implementation: str
    form: str
    why: str = ""
    """What else was considered, at what measured cost; empty where the implementation was asked for."""

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
        lines = [f"{places} {what}" for places, what in by_place([*self.fused, *self.left])]
        chosen = dict.fromkeys((fused.implementation, fused.why) for fused in self.fused if fused.why)
        lines += [f"{implementation} was chosen: {why}" for implementation, why in chosen]
        return "\n".join(lines) or "no experts found: no grouped product and no loop over gated MLPs"


class Found(Protocol):
    """An entry of a report: its text says what was found, without the place."""

    @property
    def where(self) -> str: ...


def by_place(entries: Iterable[Found]) -> Iterator[tuple[str, str]]:
    """(places, what was found there): entries of which the same is said are one."""
    places: dict[str, list[str]] = {}
    for entry in entries:
        places.setdefault(str(entry), []).append(entry.where)
    for what, where in places.items():
        yield where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more", what
