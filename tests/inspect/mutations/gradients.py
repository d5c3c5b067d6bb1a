"""Mutations of how gradients are written and reduced, over shards and over replicas."""

from fxshard.schedule.events import Kind
from tests.inspect.mutations.editing import (
    BACKWARD,
    OPTIMIZER,
    Broken,
    added,
    breaks,
    earlier,
    missing,
    not_waiting_for,
    to_the_place_of,
    twice,
)
from tests.inspect.schedules import place, zero3


@breaks(
    "reduce_after_all_writes",
    reduced_before_the_last_write=lambda: earlier(zero3(), Kind.REDUCE, 1, BACKWARD, by=2),
    never_reduced=lambda: missing(zero3(), (Kind.REDUCE, 0, BACKWARD), (Kind.FINISH, 0, BACKWARD)),
    reduced_twice=lambda: twice(zero3(), Kind.REDUCE, 1, BACKWARD),
    never_finished=lambda: missing(zero3(), (Kind.FINISH, 0, BACKWARD), (Kind.GRAD, 0, BACKWARD)),
    kept_before_the_last_write=lambda: earlier(zero3().accumulating(), Kind.ACCUMULATE, 1, BACKWARD, by=2),
    neither_kept_nor_reduced=lambda: missing(
        zero3().accumulating(), (Kind.ACCUMULATE, 0, BACKWARD), (Kind.FINISH, 0, BACKWARD)
    ),
    kept_and_reduced=lambda: twice(zero3().accumulating(), Kind.ACCUMULATE, 1, BACKWARD, kind=Kind.REDUCE),
)
def written_while_reduced() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD)
    return added(schedule, at + 1, schedule.events[at - 2]), at


@breaks("not_rewritten_before_reduced")
def written_after_the_end() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.FINISH, 0, BACKWARD) + 1
    write = place(schedule, Kind.GRAD, 0, BACKWARD) + 1
    return added(schedule, at, schedule.events[write]), at


@breaks("not_rewritten_before_reduced")
def taken_again_while_reduced() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD) + 1
    return added(schedule, at, schedule.events[place(schedule, Kind.GRAD, 1, BACKWARD)]), at


@breaks(
    "replicas_are_added_up_once",
    replicas_not_added_up=lambda: missing(
        zero3(replicas=2), (Kind.ALL_REDUCE, 1, BACKWARD), (Kind.FINISH, 1, BACKWARD)
    ),
    replicas_added_up_twice=lambda: twice(zero3(replicas=2), Kind.ALL_REDUCE, 1, BACKWARD),
    replicas_added_up_before_the_reduction=lambda: earlier(zero3(replicas=2), Kind.ALL_REDUCE, 1, BACKWARD, by=1),
    replicas_added_up_where_there_are_none=lambda: twice(zero3(), Kind.REDUCE, 1, BACKWARD, kind=Kind.ALL_REDUCE),
)
def update_does_not_wait_for_the_replicas() -> Broken:
    schedule = zero3(replicas=2)
    at, added = place(schedule, Kind.UPDATE, 1, OPTIMIZER), place(schedule, Kind.ALL_REDUCE, 1, BACKWARD)
    return not_waiting_for(schedule, at, added)


@breaks("at_most_two_gradient_buckets")
def a_third_gradient_bucket() -> Broken:
    schedule = zero3()
    grad = place(schedule, Kind.GRAD, 0, BACKWARD)
    return to_the_place_of(schedule, (Kind.FINISH, 2, BACKWARD), (Kind.GRAD, 0, BACKWARD)), grad - 1
