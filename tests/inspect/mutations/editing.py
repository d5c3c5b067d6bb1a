"""Taking a schedule apart."""

from collections.abc import Callable
from dataclasses import replace

from fxshard.schedule.events import Event, Kind, Phase
from fxshard.schedule.schedule import Schedule
from tests.inspect.schedules import change, place, relinked

FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER

Broken = tuple[Schedule, int | None]
"""A schedule, and the position of the event that the error must name; None where no single one is to blame."""


MUTATIONS: dict[str, dict[str, Callable[[], Broken]]] = {}
"""By rule: what it must catch."""


def breaks(rule: str, **short: Callable[[], Broken]) -> Callable[[Callable[[], Broken]], Callable[[], Broken]]:
    """Mutations that a rule must catch: those of one expression by name, others as functions that this decorates."""
    mutations = MUTATIONS.setdefault(rule, {})
    mutations.update(short)

    def noted(make: Callable[[], Broken]) -> Callable[[], Broken]:
        mutations[make.__name__] = make
        return make

    return noted


def numbered(schedule: Schedule, kind: Kind, number: int) -> int:
    """Position of an event that is about no layer."""
    return next(i for i, event in schedule.of(kind) if event.number == number)


def changed(schedule: Schedule, kind: Kind, which: int, phase: Phase | None = None, /, **fields: object) -> Broken:
    """Other fields of an event of a layer in a phase, or of the one with a number."""
    at = numbered(schedule, kind, which) if phase is None else place(schedule, kind, which, phase)
    return change(schedule, at, **fields), at


def at_event(schedule: Schedule, which: tuple[Kind, int, Phase], **fields: Callable[[Event], object]) -> Broken:
    """Other fields of an event, made of what it is."""
    at = place(schedule, *which)
    return change(schedule, at, **{name: made(schedule.events[at]) for name, made in fields.items()}), at


def at_number(schedule: Schedule, kind: Kind, number: int, to: int) -> Broken:
    """An event that is about no layer stands elsewhere, and is wrong there."""
    return relinked(schedule, moved(schedule, numbered(schedule, kind, number), to)), to


def moved(schedule: Schedule, source: int, target: int) -> list[Event]:
    events = list(schedule.events)
    events.insert(target, events.pop(source))
    return events


def without(schedule: Schedule, i: int) -> Schedule:
    return relinked(schedule, [event for at, event in enumerate(schedule.events) if at != i])


def added(schedule: Schedule, at: int, event: Event) -> Schedule:
    events = list(schedule.events)
    events.insert(at, event)
    return relinked(schedule, events)


def twice(schedule: Schedule, kind: Kind, bucket: int, phase: Phase, /, *, behind: int = 1, **fields: object) -> Broken:
    """An event stands there once more, with other fields, so many places behind itself: the second is wrong."""
    at = place(schedule, kind, bucket, phase)
    return added(schedule, at + behind, replace(schedule.events[at], **fields)), at + behind


def to_the_place_of(schedule: Schedule, moving: tuple[Kind, int, Phase], target: tuple[Kind, int, Phase]) -> Schedule:
    return relinked(schedule, moved(schedule, place(schedule, *moving), place(schedule, *target)))


def earlier(schedule: Schedule, kind: Kind, bucket: int, phase: Phase, by: int) -> Broken:
    """An event comes too early, and is wrong where it now stands."""
    at = place(schedule, kind, bucket, phase)
    return relinked(schedule, moved(schedule, at, at - by)), at - by


def missing(schedule: Schedule, gone: tuple[Kind, int, Phase], wrong: tuple[Kind, int, Phase]) -> Broken:
    """One event is missing, and another one is wrong without it."""
    lost, found = place(schedule, *gone), place(schedule, *wrong)
    return without(schedule, lost), found - (lost < found)


def waiting_for_nothing(schedule: Schedule, at: int) -> Broken:
    return change(schedule, at, waits_for=()), at


def not_waiting_for(schedule: Schedule, at: int, gone: int) -> Broken:
    return change(schedule, at, waits_for=tuple(n for n in schedule.events[at].waits_for if n != gone)), at
