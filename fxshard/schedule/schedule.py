"""The emitted schedule: every event of a step, in order, as data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.model_groups import ModelGroup
from fxshard.schedule.events import TENSOR, Event, Kind, Phase
from fxshard.schedule.graph_summary import GraphSummary
from fxshard.schedule.offloads import Offloaded, Recomputed

if TYPE_CHECKING:
    from fxshard.planner.hardware import Hardware
    from fxshard.schedule.diff import ScheduleDiff
    from fxshard.schedule.simulate import Simulation

COMMUNICATES = (Kind.UNSHARD, Kind.REDUCE, Kind.ALL_REDUCE, Kind.EXCHANGE, Kind.SCALES, Kind.COLLECTIVE)

MOST_NAMES = 3
"""Buckets that a title names one by one."""


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
    graphs: tuple[GraphSummary, ...] = ()
    """Summaries of the graphs that the events were recorded from."""
    model_groups: tuple[ModelGroup, ...] = ()
    """The process groups that the model communicates in itself."""
    recomputed: tuple[Recomputed, ...] = ()
    """Saved values that backward computes again because of the budget, in the order in which they were chosen."""
    offloaded: tuple[Offloaded, ...] = ()
    """Saved values that are on the host between forward and backward because of the budget."""

    def __len__(self) -> int:
        return len(self.events)

    def of(self, *kinds: Kind, phase: Phase | None = None) -> Iterator[tuple[int, Event]]:
        """(position, event) of the events of some kinds."""
        for i, event in enumerate(self.events):
            if event.kind in kinds and (phase is None or event.phase == phase):
                yield i, event

    def touched(self, event: Event) -> str:
        """The buckets that an event without one works on, in the order of the model; of many, first and last."""
        names = [self.buckets[index].name for index in sorted({*event.reads, *event.writes}, reverse=True)]
        return ", ".join(names) if len(names) <= MOST_NAMES else f"{names[0]} … {names[-1]}"

    @property
    def comm_bytes(self) -> int:
        """Bytes that one rank's collectives move per step, counted as the size of what they make or start from.

        Between buffers of one rank alone nothing travels.
        """
        return sum(event.bytes for _, event in self.of(*COMMUNICATES) if not self._alone(event))

    def group_of(self, event: Event) -> ModelGroup:
        """The process group of a collective of the model's own, or of an exchange of tensor-parallel parts."""
        if event.kind is Kind.EXCHANGE:
            cuts = next(cuts for index in event.reads if (cuts := self.buckets[index].cuts) is not None)
            return cuts.group
        return next(group for group in self.model_groups if group.name == event.group)

    def _alone(self, event: Event) -> bool:
        if event.kind is Kind.COLLECTIVE or event.stream == TENSOR:
            return self.group_of(event).ranks == 1
        if self.ranks == 1 or event.bucket_index < 0:
            return self.ranks == 1
        bucket = self.buckets[event.bucket_index]
        return bucket.reducing_ranks == 1 and bool(bucket.domain.device)  # experts that no other rank has

    @property
    def peak_bytes(self) -> int:
        """The most that one rank holds: shards, gradients and optimizer state, arena, activations and temporaries.

        The arena is one allocation for the whole step, so it counts in full wherever activations have their peak.
        """
        return self.resident_bytes + self.arena_bytes + self.activation_bytes + self.workspace_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes that a rank has allocated at the peak of a step without gradients before it, as after ``zero_grad()``.

        ``peak_bytes`` is no less: it counts all gradients, as where micro-batches add to those of the ones before.
        """
        from fxshard.schedule.peak import peak_of

        return peak_of(self).bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of one rank on the host: optimizer state that is not on the device, and offloaded activations."""
        return sum(bucket.moment_bytes for bucket in self.buckets if bucket.offload == "host") + self.offloaded_bytes

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of activations in the host's memory between forward and backward."""
        return max((event.slot.end for _, event in self.of(Kind.OFFLOAD) if event.slot is not None), default=0)

    @property
    def replicated(self) -> str:
        """How a title says that shards have replicas (HSDP), and that the model communicates itself; else empty."""
        domain = next((bucket.domain for bucket in self.buckets if not bucket.domain.name), None)
        own = ", ".join(group.name for group in self.model_groups)
        said = f", the model itself in {own}" if own else ""
        if domain is None or domain.replicas == 1:
            return said
        return f" ({domain.replicas} replicas of {domain.shards} shards){said}"

    @property
    def activation_bytes(self) -> int:
        """The most that activations take at the end of a stretch of compute, the batch and what is saved included."""
        return max((event.held for _, event in self.of(Kind.COMPUTE)), default=0)

    @property
    def workspace_bytes(self) -> int:
        """What temporaries inside a stretch of compute, results of the model's own collectives, or moments that an
        update brings from the host, add to ``activation_bytes`` at most."""
        most = max((event.peak for _, event in self.of(Kind.COMPUTE, Kind.COLLECTIVE, Kind.UPDATE)), default=0)
        return most - self.activation_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes of activations that forward leaves for backward; activation checkpointing makes them fewer."""
        held = 0
        for _, event in self.of(Kind.COMPUTE, Kind.RELEASE, phase=Phase.FORWARD):
            held = event.held if event.kind is Kind.COMPUTE else held - event.bytes
        return held

    def communication(self) -> list[str]:
        """The collectives, one line each, those of each kind in launch order: what ranks have in common.

        Each kind runs in process groups of its own, so how they interleave may differ from rank to rank. Not so those
        of the model's own: all of them are in one order, whatever their groups. How much they send is data.
        """
        return [_line(event) for kind in COMMUNICATES for _, event in self.of(kind)]

    @property
    def digest(self) -> str:
        """Equal on all ranks, or the ranks refuse to start."""
        return hashlib.sha256("\n".join(self.communication()).encode()).hexdigest()[:16]

    def accumulating(self) -> Schedule:
        """The same micro-batch inside ``no_sync``: gradients are kept, not reduced, and nothing is updated."""
        from fxshard.schedule.accumulation import accumulating

        return accumulating(self)

    def verify(self) -> None:
        """Prove that the schedule is safe to run; raises :class:`fxshard.ScheduleError` naming rule and event."""
        from fxshard.schedule.verify import verify

        verify(self)

    def simulate(self, hardware: str | Hardware = "h200", **options: Any) -> Simulation:
        """A timeline of one step on a machine: step time, exposed communication, memory over time."""
        from fxshard.schedule.simulate import simulate

        return simulate(self, hardware, **options)

    def diff(self, other: Schedule) -> ScheduleDiff:
        """The changes from this schedule to another; ``print`` them."""
        from fxshard.schedule.diff import diff

        return diff(self, other)

    def to_json(self) -> str:
        """The whole schedule as text that :meth:`from_json` reads back."""
        from fxshard.schedule.files import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> Schedule:
        from fxshard.schedule.files import from_json

        return from_json(text)

    def to_chrome_trace(self, path: str | Path | None = None, hardware: str | Hardware = "h200") -> str:
        """A simulated step for Perfetto or chrome://tracing; written to ``path`` if one is given."""
        from fxshard.schedule.trace import to_chrome_trace

        return _written(to_chrome_trace(self, self.simulate(hardware)), path)

    def to_html(self, path: str | Path | None = None, hardware: str | Hardware = "h200", about: str = "") -> str:
        """One self-contained page: streams, memory, buckets; written to ``path`` if one is given.

        ``about``: what the page shall say on top, such as the model and its batch.
        """
        from fxshard.planner.hardware import hardware as known
        from fxshard.schedule.html import to_html

        return _written(to_html(self, self.simulate(hardware), known(hardware), about), path)

    def __str__(self) -> str:
        from fxshard.schedule.table import render

        return render(self)


def _line(event: Event) -> str:
    what = event.op if event.kind is Kind.COLLECTIVE else f"{event.bucket} {event.bytes}"
    return f"{event.phase} {event.kind} {what} {event.dtype} in {event.group}"


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def size(count: float) -> str:
    """Bytes as a person reads them."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
