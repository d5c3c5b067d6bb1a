"""A schedule as its rules look at it: what happens to each bucket, in order, and which arena bytes are held when.

A step is a cycle: a gather in the optimizer phase belongs to the next forward, whose ``wait`` stands at the head of the
list without a gather before it. Such a bucket is called *carried*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from fxshard._torch.errors import FxshardError
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.gather_modes import Copies
from fxshard.planner.memory import SlotRange
from fxshard.schedule.events import OF_MANY, OF_MODEL, Event, Kind, Phase
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.updates import updates

READ, WRITE = "read", "write"
"""Uses of a bucket by compute events, in addition to the kinds of runtime events."""


class ScheduleError(FxshardError):
    """A schedule breaks a rule. This is a bug in the code that built or edited the schedule, never in the model."""

    def __init__(self, message: str, rule: str = "", index: int | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        """Name of the rule, which is the name of a function."""
        self.index = index
        """Position of the event that breaks it."""


@dataclass(frozen=True)
class Step:
    """A schedule, and what happens to each of its buckets in order: what the rules look at."""

    schedule: Schedule

    @cached_property
    def trails(self) -> dict[int, list[tuple[int, str]]]:
        """{bucket: [(position, kind or READ or WRITE)]}"""
        trails: dict[int, list[tuple[int, str]]] = {}
        for i, event in enumerate(self.schedule.events):
            if event.kind is Kind.COMPUTE or event.kind in OF_MODEL:
                for index in event.reads:
                    trails.setdefault(index, []).append((i, READ))
                for index in event.writes:
                    trails.setdefault(index, []).append((i, WRITE))
            elif event.kind not in OF_MANY:
                trails.setdefault(event.bucket_index, []).append((i, event.kind))
        return trails

    @cached_property
    def carried(self) -> dict[int, int]:
        """{bucket: position of its gather in the optimizer phase} of buckets that the next step starts with."""
        waited: dict[int, bool] = {}  # whether the first of gather and wait is the wait
        found: dict[int, int] = {}
        for i, event in enumerate(self.schedule.events):
            index = event.bucket_index
            if event.kind in (Kind.UNSHARD, Kind.WAIT):
                waited.setdefault(index, event.kind is Kind.WAIT)
                if event.kind is Kind.UNSHARD and event.phase is Phase.OPTIMIZER and waited[index]:
                    found[index] = i
        return found

    @cached_property
    def planned_updates(self) -> list[Event]:
        """The events of an optimizer of fxshard's in this step, by its plan for the buckets."""
        events = self.schedule.events
        reduced = {event.bucket_index: event for event in events if event.kind is Kind.REDUCE}
        carried = {e.bucket_index: e for e in events if e.kind is Kind.UNSHARD and e.phase is Phase.OPTIMIZER}
        group = next((event.group for event in events if event.kind in (Kind.UNSHARD, Kind.REDUCE)), "none")
        return updates(reduced, self.schedule.buckets, carried, group)

    def bucket(self, index: int) -> BucketPlan:
        return self.schedule.buckets[index]

    def event(self, i: int) -> Event:
        return self.schedule.events[i]

    def lives(self) -> Iterator[tuple[int, SlotRange, bool]]:
        """(position, slot, taken or given back) of arena memory, in order. Carried buckets are there from the start."""
        held: dict[tuple[Kind, int], SlotRange] = {}
        for index, i in self.carried.items():
            slot = self.event(i).slot
            if slot is not None:
                held[self.given_back_by(self.event(i)), index] = slot
                yield i, slot, True
        for i, event in enumerate(self.schedule.events):
            if event.kind in GIVEN_BACK_BY and event.slot is not None:
                held[self.given_back_by(event), event.bucket_index] = event.slot
                yield i, event.slot, True
            elif (event.kind, event.bucket_index) in held:
                yield i, held.pop((event.kind, event.bucket_index)), False

    def given_back_by(self, event: Event) -> Kind:
        """The kind of event that frees what an event takes; a staging buffer is free when its gather is waited for."""
        staged = event.kind is Kind.UNSHARD and self.bucket(event.bucket_index).staged_in_arena
        return Kind.WAIT if staged else GIVEN_BACK_BY[event.kind]

    def broken(self, rule: Callable[[Step], None], i: int, what: str) -> NoReturn:
        raise error_at(self.schedule, rule.__name__, i, what)

    def has_right(self, rule: Callable[[Step], None], i: int, wanted: Mapping[str, Any]) -> None:
        """Fields of an event have the values that are ``wanted``."""
        event = self.event(i)
        for field, value in wanted.items():
            if getattr(event, field) != value:
                self.broken(rule, i, f"has {field} {getattr(event, field)!r} where {value!r} is right")

    def fails(self, rule: Callable[[Step], None], what: str) -> NoReturn:
        """Where no single event is to blame."""
        raise ScheduleError(f"{rule.__name__}: {what}", rule.__name__)


OF_NO_BUCKET: dict[str, Any] = {"bucket": "", "bucket_index": -1, "params": (), "slot": None, "copies": Copies.NONE}
"""Fields of an event about no bucket in particular."""
COMPUTES_NOTHING = dict.fromkeys(("flops", "traffic", "held", "peak", "nodes"), 0)
"""Fields of an event that is no stretch of compute."""

GIVEN_BACK_BY = {Kind.UNSHARD: Kind.RESHARD, Kind.GRAD: Kind.FINISH}


def error_at(schedule: Schedule, rule: str, i: int, what: str) -> ScheduleError:
    event = schedule.events[i]
    about = f" of {event.bucket!r}" if event.bucket else ""
    return ScheduleError(f"{rule}: event {i} ({event.phase} {event.kind}{about}) {what}", rule, i)
