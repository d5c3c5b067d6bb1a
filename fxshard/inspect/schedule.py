"""The emitted schedule: every event of a step, in order, as data."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from fxshard.events import Event, Kind, Phase
from fxshard.plan.buckets import BucketPlan

COMMUNICATES = (Kind.UNSHARD, Kind.REDUCE)


@dataclass(frozen=True)
class Schedule:
    """What the ranks do in one step: forward, backward and optimizer, or one evaluation.

    ``events`` are in program order. The arena is one allocation of ``arena_bytes``; events that take memory in it say
    where (``Event.slot``). ``resident_bytes`` is what a rank holds all the time: shards, gradients, optimizer state.

    >>> print(model.schedule)
    """

    events: tuple[Event, ...]
    buckets: tuple[BucketPlan, ...]
    arena_bytes: int
    resident_bytes: int
    ranks: int
    zero: int
    budget: int | None = None

    def __len__(self) -> int:
        return len(self.events)

    def of(self, *kinds: Kind, phase: Phase | None = None) -> Iterator[tuple[int, Event]]:
        """(position, event) of the events of some kinds."""
        for i, event in enumerate(self.events):
            if event.kind in kinds and (phase is None or event.phase is phase):
                yield i, event

    @property
    def comm_bytes(self) -> int:
        """Bytes that one rank's collectives move per step, counted as the size of the unsharded buffers."""
        return sum(event.bytes for _, event in self.of(*COMMUNICATES))

    @property
    def peak_bytes(self) -> int:
        """The most that one rank holds in shards and arena. Activations are not part of it."""
        return self.resident_bytes + self.arena_bytes

    def communication(self) -> list[str]:
        """The collectives in launch order, one line each: what all ranks must have in common."""
        return [
            f"{event.phase} {event.kind} {event.bucket} {event.bytes} {event.dtype} in {event.group}"
            for _, event in self.of(*COMMUNICATES)
        ]

    @property
    def digest(self) -> str:
        """Equal on all ranks, or the ranks refuse to start."""
        return hashlib.sha256("\n".join(self.communication()).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return _table(self.events, f"ZeRO-{self.zero} on {self.ranks} rank(s), arena {size(self.arena_bytes)}, {self.digest}")


def _table(events: Sequence[Event], title: str) -> str:
    table = Table(title=title)
    for column in ("#", "phase", "event", "bucket", "bytes", "dtype", "arena", "why"):
        table.add_column(column, justify="right" if column in ("#", "bytes") else "left")
    for i, event in enumerate(events):
        if event.kind is Kind.COMPUTE:
            continue
        at = f"{size(event.slot.offset)} +{size(event.slot.bytes)}" if event.slot is not None else ""
        moved = size(event.bytes) if event.kind in COMMUNICATES else ""
        dtype = str(event.dtype).removeprefix("torch.") if moved else ""
        table.add_row(str(i), event.phase, event.kind, event.bucket, moved, dtype, at, event.why)
    text = io.StringIO()
    Console(file=text, width=140).print(table)
    return text.getvalue()


def size(count: float) -> str:
    """Bytes as a person reads them."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
