"""Mutants of a schedule, generated: each field of the header, of every bucket and of every event in turn, and events
that are dropped, doubled or swapped. Nothing here knows the rules of the verifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch

from fxshard._torch.errors import FxshardError
from fxshard.kernels.float8 import Scaling
from fxshard.planner.gather_modes import Float8Recipe
from fxshard.planner.memory import SlotRange
from fxshard.planner.model_groups import ModelGroup
from fxshard.planner.parts import Cuts, Whole
from fxshard.schedule.dependencies import with_dependencies
from fxshard.schedule.events import Event
from fxshard.schedule.schedule import Schedule

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32)
HUGE = 10**18
RELINKED = ("kind", "phase", "bucket_index", "slot", "reads", "writes")
"""Fields of an event that ``waits_for`` follows from: each mutant of them comes also with ``waits_for`` made to fit."""


@dataclass(frozen=True)
class Mutant:
    """A schedule that differs in one place from one that is right."""

    field: str
    """What kind of place: ``event.unshard.bytes``, ``buckets.layout.ranks``, ``swap unshard wait``."""
    what: str
    make: Callable[[], Schedule | None]
    """None where there is no such schedule."""


def mutants(schedule: Schedule) -> Iterator[Mutant]:
    """All of them, in order."""
    yield from _header(schedule)
    yield from _fields_of_events(schedule)
    yield from _order_of_events(schedule)


def _header(schedule: Schedule) -> Iterator[Mutant]:
    names = [bucket.name for bucket in schedule.buckets]
    for field in fields(Schedule):
        if field.name != "events":
            value = getattr(schedule, field.name)
            for where, at, other in _variants(value, field.name, field.name, names):
                yield Mutant(where, f"{at} = {_short(other)}", partial(replace, schedule, **{field.name: other[1]}))


def _fields_of_events(schedule: Schedule) -> Iterator[Mutant]:
    strings = [text for event in schedule.events for text in (event.bucket, event.group, event.stream)]
    pool = list(dict.fromkeys(strings))
    for i, event in enumerate(schedule.events):
        for field in fields(Event):
            where = f"event.{event.kind}.{field.name}"
            for kind, at, other in _variants(getattr(event, field.name), where, f"events[{i}].{field.name}", pool):
                mutated = partial(_with_event, schedule, i, replace(event, **{field.name: other[1]}))
                yield Mutant(kind, f"{at} = {_short(other)}", mutated)
                if field.name in RELINKED:
                    yield Mutant(kind, f"{at} = {_short(other)}, relinked", partial(_relinked, mutated))


def _order_of_events(schedule: Schedule) -> Iterator[Mutant]:
    events = schedule.events
    for i, event in enumerate(events):
        edits = {f"drop {event.kind}": [*range(i), *range(i + 1, len(events))]}
        edits[f"double {event.kind}"] = [*range(i + 1), *range(i, len(events))]
        if i + 1 < len(events) and events[i + 1] != event:
            edits[f"swap {event.kind} {events[i + 1].kind}"] = [
                *range(i), i + 1, i, *range(i + 2, len(events)),
            ]  # fmt: skip
        for what, order in edits.items():
            as_it_is = partial(_reordered, schedule, order)
            yield Mutant(what, f"{what} at {i}", as_it_is)
            yield Mutant(what, f"{what} at {i}, renumbered", partial(_renumbered, schedule, order))
            yield Mutant(what, f"{what} at {i}, relinked", partial(_relinked, as_it_is))


def _with_event(schedule: Schedule, i: int, event: Event) -> Schedule:
    return replace(schedule, events=(*schedule.events[:i], event, *schedule.events[i + 1 :]))


def _reordered(schedule: Schedule, order: list[int]) -> Schedule:
    return replace(schedule, events=tuple(schedule.events[old] for old in order))


def _renumbered(schedule: Schedule, order: list[int]) -> Schedule:
    """The events in another order, each waiting for the same events as before, as far as they are there."""
    now = {old: new for new, old in enumerate(order)}
    events = [schedule.events[old] for old in order]
    moved = [replace(e, waits_for=tuple(sorted(now[n] for n in e.waits_for if n in now))) for e in events]
    return replace(schedule, events=tuple(moved))


def _relinked(make: Callable[[], Schedule]) -> Schedule | None:
    """With ``waits_for`` as the recorder would write it; None where there is nothing to write for such events."""
    schedule = make()
    try:
        return replace(schedule, events=tuple(with_dependencies(list(schedule.events), schedule.buckets)))
    except (IndexError, AssertionError):
        return None


_SOMETHING: dict[str, Any] = {
    "params": "other",
    "matrices": "other",
    "shape": 1,
    "reads": 0,
    "writes": 0,
    "waits_for": 0,
}
"""What an empty list could hold."""

Variant = tuple[str, str, tuple[Any, Any]]
"""The kind of place, the place, and (what is put there, the whole value with it)."""


def _variants(value: Any, kind: str, at: str, pool: list[str]) -> Iterator[Variant]:
    if is_dataclass(value):
        for field in fields(value):
            inner = getattr(value, field.name)
            for where, place, (new, whole) in _variants(inner, f"{kind}.{field.name}", f"{at}.{field.name}", pool):
                changed = _replaced(value, field.name, whole)
                if changed is not None:
                    yield where, place, (new, changed)
    elif isinstance(value, tuple):
        yield from _variants_of_tuple(value, kind, at, pool)
        return
    else:
        for other in _others(value, kind, pool):
            yield kind, at, (other, other)
    if isinstance(value, SlotRange):
        yield kind, at, (None, None)


def _variants_of_tuple(value: tuple[Any, ...], kind: str, at: str, pool: list[str]) -> Iterator[Variant]:
    for i, item in enumerate(value):
        for where, place, (new, whole) in _variants(item, kind, f"{at}[{i}]", pool):
            yield where, place, (new, (*value[:i], whole, *value[i + 1 :]))
    changed = {value[1:], value[:-1], (*value, *value[-1:]), value[::-1]}
    if not value:
        changed = {(_SOMETHING[kind.split(".")[-1]],)} if kind.startswith(("event", "buckets")) else set()
    for other in sorted(changed - {value}, key=repr):
        yield f"{kind}[]", at, (other, other)


def _others(value: Any, kind: str, pool: list[str]) -> list[Any]:
    found: list[Any]
    if isinstance(value, Enum):
        found = list(type(value))
    elif isinstance(value, bool):
        found = [not value]
    elif isinstance(value, int):
        found = [value + 1, value - 1, -1, 0, 1, HUGE]
    elif isinstance(value, float):
        found = [value * 2, -1.0, math.nan]
    elif isinstance(value, torch.dtype):
        found = list(DTYPES)
    elif isinstance(value, str):
        found = ["other", "", *(text for text in pool if text != value)][:6]
    elif value is None and kind.endswith(".float8"):
        found = [Float8Recipe(Scaling.TENSOR), Float8Recipe(Scaling.BLOCK)]
    elif value is None and kind.endswith(".cuts"):
        found = [Cuts(ModelGroup("tp", 2), (Whole(name, (2, 2)),)) for name in ("other", pool[0])]
    elif value is None:
        found = [SlotRange(0, 512)] if kind.startswith("event") else [-1, 0, 1, HUGE]
    else:
        raise TypeError(f"no mutants of a {type(value).__name__} are known")
    return [other for other in dict.fromkeys(found) if other != value]


def _replaced(value: Any, name: str, other: Any) -> Any:
    """The record with another value; None where its class refuses to hold it, as reading a file then does."""
    try:
        return replace(value, **{name: other})
    except FxshardError:
        return None


def _short(other: tuple[Any, Any]) -> str:
    text = repr(other[0])
    return text if len(text) < 60 else text[:57] + "..."
