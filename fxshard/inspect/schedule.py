"""The emitted schedule: every runtime event of a step, in order, as data."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from torch import fx

from fxshard.events import Event, Kind, Phase, events
from fxshard.plan.buckets import BucketPlan
from fxshard.plan.memory import MemoryPlan

_COMMUNICATES = (Kind.UNSHARD, Kind.REDUCE)


@dataclass(frozen=True)
class Schedule:
    """What the ranks do in one step. ``print(schedule)`` shows it as a table."""

    events: tuple[Event, ...]
    buckets: tuple[BucketPlan, ...]
    arena_bytes: int
    ranks: int
    zero: int

    @classmethod
    def from_graphs(
        cls,
        graphs: Mapping[Phase, fx.GraphModule],
        buckets: Sequence[BucketPlan],
        memory: MemoryPlan,
        *,
        ranks: int,
        zero: int,
    ) -> Schedule:
        found = [event for module in graphs.values() for _, event in events(module.graph)]
        return cls(tuple(found), tuple(buckets), memory.bytes, ranks, zero)

    def communication(self) -> list[str]:
        """The collectives in launch order, one line each: what all ranks must have in common."""
        return [
            f"{event.phase} {event.kind} {event.bucket} {event.bytes} {event.dtype}"
            for event in self.events
            if event.kind in _COMMUNICATES
        ]

    @property
    def digest(self) -> str:
        """Equal on all ranks, or the ranks refuse to start."""
        return hashlib.sha256("\n".join(self.communication()).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        table = Table(title=f"ZeRO-{self.zero} on {self.ranks} rank(s), arena {_size(self.arena_bytes)}, {self.digest}")
        for column in ("#", "phase", "event", "bucket", "bytes", "dtype", "arena", "why"):
            table.add_column(column, justify="right" if column in ("#", "bytes") else "left")
        for i, event in enumerate(self.events):
            at = f"{_size(event.slot.offset)} +{_size(event.slot.bytes)}" if event.slot is not None else ""
            size = _size(event.bytes) if event.kind in _COMMUNICATES else ""
            dtype = str(event.dtype).removeprefix("torch.") if size else ""
            table.add_row(str(i), event.phase, event.kind, event.bucket, size, dtype, at, event.why)
        text = io.StringIO()
        Console(file=text, width=140).print(table)
        return text.getvalue()


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
