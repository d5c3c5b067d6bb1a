"""Mutations of how gradients are written and reduced, over shards and over replicas."""

from dataclasses import replace

from fxshard.schedule.events import Kind
from tests.inspect.mutations.editing import BACKWARD, OPTIMIZER, Broken, added, breaks, earlier, missing, moved, twice
from tests.inspect.schedules import change, place, relinked, zero3


@breaks("reduce_after_all_writes")
def reduced_before_the_last_write() -> Broken:
    return earlier(zero3(), Kind.REDUCE, 1, BACKWARD, by=2)


@breaks("reduce_after_all_writes")
def written_while_reduced() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD)
    return added(schedule, at + 1, schedule.events[at - 2]), at


@breaks("reduce_after_all_writes")
def never_reduced() -> Broken:
    return missing(zero3(), (Kind.REDUCE, 0, BACKWARD), (Kind.FINISH, 0, BACKWARD))


@breaks("reduce_after_all_writes")
def reduced_twice() -> Broken:
    return twice(zero3(), Kind.REDUCE, 1, BACKWARD)


@breaks("reduce_after_all_writes")
def never_finished() -> Broken:
    return missing(zero3(), (Kind.FINISH, 0, BACKWARD), (Kind.GRAD, 0, BACKWARD))


@breaks("reduce_after_all_writes")
def kept_before_the_last_write() -> Broken:
    return earlier(zero3().accumulating(), Kind.ACCUMULATE, 1, BACKWARD, by=2)


@breaks("reduce_after_all_writes")
def neither_kept_nor_reduced() -> Broken:
    return missing(zero3().accumulating(), (Kind.ACCUMULATE, 0, BACKWARD), (Kind.FINISH, 0, BACKWARD))


@breaks("reduce_after_all_writes")
def kept_and_reduced() -> Broken:
    schedule = zero3().accumulating()
    at = place(schedule, Kind.ACCUMULATE, 1, BACKWARD)
    return added(schedule, at, replace(schedule.events[at], kind=Kind.REDUCE)), at + 1


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


@breaks("replicas_are_added_up_once")
def replicas_not_added_up() -> Broken:
    return missing(zero3(replicas=2), (Kind.ALL_REDUCE, 1, BACKWARD), (Kind.FINISH, 1, BACKWARD))


@breaks("replicas_are_added_up_once")
def replicas_added_up_twice() -> Broken:
    return twice(zero3(replicas=2), Kind.ALL_REDUCE, 1, BACKWARD)


@breaks("replicas_are_added_up_once")
def replicas_added_up_before_the_reduction() -> Broken:
    return earlier(zero3(replicas=2), Kind.ALL_REDUCE, 1, BACKWARD, by=1)


@breaks("replicas_are_added_up_once")
def replicas_added_up_where_there_are_none() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD)
    return added(schedule, at + 1, replace(schedule.events[at], kind=Kind.ALL_REDUCE)), at + 1


@breaks("replicas_are_added_up_once")
def update_does_not_wait_for_the_replicas() -> Broken:
    schedule = zero3(replicas=2)
    at, added = place(schedule, Kind.UPDATE, 1, OPTIMIZER), place(schedule, Kind.ALL_REDUCE, 1, BACKWARD)
    return change(schedule, at, waits_for=tuple(set(schedule.events[at].waits_for) - {added})), at


@breaks("at_most_two_gradient_buckets")
def a_third_gradient_bucket() -> Broken:
    schedule = zero3()
    finish, grad = place(schedule, Kind.FINISH, 2, BACKWARD), place(schedule, Kind.GRAD, 0, BACKWARD)
    return relinked(schedule, moved(schedule, finish, grad)), grad - 1
