"""Mutations of when parameters are gathered, read and given back."""

from fxshard.schedule.events import Kind
from tests.inspect.mutations.editing import BACKWARD, FORWARD, Broken, added, breaks, missing, moved, twice
from tests.inspect.schedules import change, place, relinked, zero3


@breaks("reads_between_wait_and_reshard")
def released_before_a_read() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.RESHARD, 0, FORWARD)
    return relinked(schedule, moved(schedule, at, at - 1)), at


@breaks("reads_between_wait_and_reshard")
def read_before_the_wait() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.WAIT, 1, BACKWARD)
    read = next(i for i, event in enumerate(schedule.events) if i > at and event.reads)
    return relinked(schedule, moved(schedule, at, read)), read - 1


@breaks("reads_between_wait_and_reshard")
def read_of_what_is_never_gathered() -> Broken:
    schedule = zero3()
    bucket = schedule.events[place(schedule, Kind.UNSHARD, 2, FORWARD)].bucket_index
    return change(schedule, 3, reads=(*schedule.events[3].reads, bucket)), 3


def no_reshard() -> Broken:
    return missing(zero3(), (Kind.RESHARD, 0, BACKWARD), (Kind.UNSHARD, 0, BACKWARD))


breaks(
    "unshard_has_one_wait_and_one_reshard",
    no_wait=lambda: missing(zero3(), (Kind.WAIT, 0, BACKWARD), (Kind.RESHARD, 0, BACKWARD)),
    wait_twice=lambda: twice(zero3(), Kind.WAIT, 0, FORWARD),
    no_unshard=lambda: missing(zero3(), (Kind.UNSHARD, 0, BACKWARD), (Kind.WAIT, 0, BACKWARD)),
    no_reshard=no_reshard,
    reshard_twice=lambda: twice(zero3(), Kind.RESHARD, 0, FORWARD),
    reshard_of_a_resident_bucket=lambda: twice(zero3(zero=2), Kind.WAIT, 0, BACKWARD, behind=2, kind=Kind.RESHARD),
)


@breaks(
    "no_double_gather",
    gathered_again_though_kept=lambda: twice(zero3(), Kind.WAIT, 2, BACKWARD, behind=0, kind=Kind.UNSHARD),
    kept_by_mistake=lambda: missing(zero3(), (Kind.RESHARD, 0, FORWARD), (Kind.UNSHARD, 0, BACKWARD)),
    resident_gathered_twice=lambda: twice(zero3(zero=1), Kind.WAIT, 1, BACKWARD, behind=0, kind=Kind.UNSHARD),
)
def gathered_twice() -> Broken:
    schedule = zero3()
    unshard, wait = place(schedule, Kind.UNSHARD, 1, FORWARD), place(schedule, Kind.WAIT, 1, FORWARD)
    return added(schedule, wait, schedule.events[unshard]), wait
