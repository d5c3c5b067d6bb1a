"""Taking a schedule apart."""

from collections.abc import Callable

from fxshard.schedule.events import Event, Kind, Phase
from fxshard.schedule.schedule import Schedule
from tests.inspect.schedules import change, place, relinked

FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER

Broken = tuple[Schedule, int | None]
"""A schedule, and the position of the event that the error must name; None where no single one is to blame."""


MUTATIONS: dict[str, list[Callable[[], Broken]]] = {}
"""By rule: what it must catch."""


def breaks(rule: str) -> Callable[[Callable[[], Broken]], Callable[[], Broken]]:
    def noted(make: Callable[[], Broken]) -> Callable[[], Broken]:
        MUTATIONS.setdefault(rule, []).append(make)
        return make

    return noted


def numbered(schedule: Schedule, kind: Kind, number: int) -> int:
    """Position of an event that is about no layer."""
    return next(i for i, event in schedule.of(kind) if event.number == number)


def changed(schedule: Schedule, kind: Kind, which: int, phase: Phase | None = None, /, **fields: object) -> Broken:
    """Other fields of an event of a layer in a phase, or of the one with a number."""
    at = numbered(schedule, kind, which) if phase is None else place(schedule, kind, which, phase)
    return change(schedule, at, **fields), at


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


def twice(schedule: Schedule, kind: Kind, bucket: int, phase: Phase) -> Broken:
    """An event stands there once more, right behind itself: the second is wrong."""
    at = place(schedule, kind, bucket, phase)
    return added(schedule, at, schedule.events[at]), at + 1


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
