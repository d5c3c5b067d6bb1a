"""Taking a schedule apart."""

from fxshard.events import Event, Phase
from fxshard.inspect.schedule import Schedule
from tests.inspect.schedules import relinked

FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER

Broken = tuple[Schedule, int]
"""A schedule, and the position of the event that the error must name."""


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
