"""Mutations of when parameters are gathered, read and given back."""

from collections.abc import Callable
from dataclasses import replace

from fxshard.schedule.events import Kind
from tests.inspect.mutations.editing import BACKWARD, FORWARD, Broken, added, missing, moved, twice
from tests.inspect.schedules import change, place, relinked, zero3


def released_before_a_read() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.RESHARD, 0, FORWARD)
    return relinked(schedule, moved(schedule, at, at - 1)), at


def read_before_the_wait() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.WAIT, 1, BACKWARD)
    read = next(i for i, event in enumerate(schedule.events) if i > at and event.reads)
    return relinked(schedule, moved(schedule, at, read)), read - 1


def read_of_what_is_never_gathered() -> Broken:
    schedule = zero3()
    bucket = schedule.events[place(schedule, Kind.UNSHARD, 2, FORWARD)].bucket_index
    return change(schedule, 3, reads=(*schedule.events[3].reads, bucket)), 3


def no_wait() -> Broken:
    return missing(zero3(), (Kind.WAIT, 0, BACKWARD), (Kind.RESHARD, 0, BACKWARD))


def wait_twice() -> Broken:
    return twice(zero3(), Kind.WAIT, 0, FORWARD)


def no_unshard() -> Broken:
    return missing(zero3(), (Kind.UNSHARD, 0, BACKWARD), (Kind.WAIT, 0, BACKWARD))


def no_reshard() -> Broken:
    return missing(zero3(), (Kind.RESHARD, 0, BACKWARD), (Kind.UNSHARD, 0, BACKWARD))


def reshard_twice() -> Broken:
    return twice(zero3(), Kind.RESHARD, 0, FORWARD)


def reshard_of_a_resident_bucket() -> Broken:
    schedule = zero3(zero=2)
    at = place(schedule, Kind.WAIT, 0, BACKWARD) + 2
    return added(schedule, at, replace(schedule.events[at - 2], kind=Kind.RESHARD)), at


def gathered_twice() -> Broken:
    schedule = zero3()
    unshard, wait = place(schedule, Kind.UNSHARD, 1, FORWARD), place(schedule, Kind.WAIT, 1, FORWARD)
    return added(schedule, wait, schedule.events[unshard]), wait


def gathered_again_though_kept() -> Broken:
    schedule = zero3()
    wait = place(schedule, Kind.WAIT, 2, BACKWARD)
    return added(schedule, wait, replace(schedule.events[wait], kind=Kind.UNSHARD)), wait


def kept_by_mistake() -> Broken:
    return missing(zero3(), (Kind.RESHARD, 0, FORWARD), (Kind.UNSHARD, 0, BACKWARD))


def resident_gathered_twice() -> Broken:
    schedule = zero3(zero=1)
    at = place(schedule, Kind.WAIT, 1, BACKWARD)
    return added(schedule, at, replace(schedule.events[at], kind=Kind.UNSHARD)), at


MUTATIONS: dict[str, tuple[Callable[[], Broken], ...]] = {
    "reads_between_wait_and_reshard": (
        released_before_a_read,
        read_before_the_wait,
        read_of_what_is_never_gathered,
    ),
    "unshard_has_one_wait_and_one_reshard": (
        no_wait,
        wait_twice,
        no_unshard,
        no_reshard,
        reshard_twice,
        reshard_of_a_resident_bucket,
    ),
    "no_double_gather": (
        gathered_twice,
        gathered_again_though_kept,
        kept_by_mistake,
        resident_gathered_twice,
    ),
}
