"""Mutations of places in the arena and of what waits for what."""

from dataclasses import replace

from fxshard.planner.memory import SlotRange
from fxshard.schedule.events import Kind
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.verify import Step
from tests.inspect.mutations.editing import BACKWARD, FORWARD, OPTIMIZER, Broken, breaks, changed, waiting_for_nothing
from tests.inspect.schedules import change, place, zero3


def _peak_at(schedule: Schedule) -> int:
    held, totals = 0, dict[int, int]()
    for i, slot, taken in Step(schedule).lives():
        held += slot.bytes if taken else -slot.bytes
        totals.setdefault(held, i)
    return totals[max(totals)]


@breaks("no_arena_overlap")
def two_buffers_in_one_place() -> Broken:
    schedule = zero3()
    first, second = place(schedule, Kind.UNSHARD, 0, FORWARD), place(schedule, Kind.UNSHARD, 1, FORWARD)
    return change(schedule, second, slot=schedule.events[first].slot), second


@breaks("no_arena_overlap")
def a_gradient_in_the_place_of_a_kept_bucket() -> Broken:
    schedule = zero3()
    kept, grad = place(schedule, Kind.UNSHARD, 2, FORWARD), place(schedule, Kind.GRAD, 2, BACKWARD)
    return change(schedule, grad, slot=schedule.events[kept].slot), grad


@breaks("no_arena_overlap")
def two_buffers_share_a_byte() -> Broken:
    schedule = zero3()
    first, second = place(schedule, Kind.UNSHARD, 0, FORWARD), place(schedule, Kind.UNSHARD, 1, FORWARD)
    slot = schedule.events[first].slot
    assert slot is not None
    moved = SlotRange(slot.end - 1, slot.bytes)
    return replace(change(schedule, second, slot=moved), arena_bytes=10**6), second


@breaks("no_arena_overlap")
def beyond_the_arena() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.UNSHARD, 0, FORWARD)
    slot = schedule.events[at].slot
    assert slot is not None
    return change(schedule, at, slot=SlotRange(schedule.arena_bytes - slot.bytes + 1, slot.bytes)), at


@breaks("no_arena_overlap")
def a_place_too_small() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.GRAD, 0, BACKWARD)
    slot = schedule.events[at].slot
    assert slot is not None
    return change(schedule, at, slot=SlotRange(slot.offset, slot.bytes - 1)), at


@breaks("no_arena_overlap")
def no_place() -> Broken:
    return changed(zero3(), Kind.GRAD, 0, BACKWARD, slot=None)


@breaks("no_arena_overlap")
def a_place_for_what_stays_elsewhere() -> Broken:
    schedule = zero3(zero=1)
    at = place(schedule, Kind.GRAD, 0, BACKWARD)
    return replace(change(schedule, at, slot=SlotRange(0, 4096)), arena_bytes=4096), at


@breaks("peak_is_what_it_says")
def over_budget() -> Broken:
    schedule = zero3()
    return replace(schedule, budget=schedule.peak_bytes - 1), _peak_at(schedule)


@breaks("peak_is_what_it_says")
def shards_that_are_not_counted() -> Broken:
    schedule = zero3()
    return replace(schedule, resident_bytes=0), _peak_at(schedule)


@breaks("dependencies_point_backwards")
def waits_for_the_future() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.WAIT, 0, FORWARD)
    return change(schedule, at, waits_for=(*schedule.events[at].waits_for, at + 1)), at


@breaks("dependencies_point_backwards")
def wait_does_not_wait() -> Broken:
    schedule = zero3()
    return waiting_for_nothing(schedule, place(schedule, Kind.WAIT, 1, FORWARD))


@breaks("dependencies_point_backwards")
def reduction_does_not_wait_for_the_write() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD)
    last = max(schedule.events[at].waits_for)
    return change(schedule, at, waits_for=tuple(set(schedule.events[at].waits_for) - {last})), at


@breaks("dependencies_point_backwards")
def update_does_not_wait() -> Broken:
    schedule = zero3()
    return waiting_for_nothing(schedule, place(schedule, Kind.UPDATE, 1, OPTIMIZER))


@breaks("dependencies_point_backwards")
def replicas_do_not_wait_for_the_reduction() -> Broken:
    schedule = zero3(replicas=2)
    return waiting_for_nothing(schedule, place(schedule, Kind.ALL_REDUCE, 1, BACKWARD))


@breaks("dependencies_point_backwards")
def gather_does_not_wait_for_its_place() -> Broken:
    schedule = zero3(layers=4, keep_last=False)
    return waiting_for_nothing(schedule, next(i for i, event in schedule.of(Kind.UNSHARD) if event.waits_for))


@breaks("dependencies_point_backwards")
def gradient_does_not_wait_for_its_place() -> Broken:
    schedule = zero3(layers=4)
    return waiting_for_nothing(schedule, place(schedule, Kind.GRAD, 1, BACKWARD))


@breaks("dependencies_point_backwards")
def gather_does_not_wait_for_the_place_of_kept_gradients() -> Broken:
    schedule = zero3(layers=4, prefetch=0).accumulating()
    taken, freed = place(schedule, Kind.GRAD, 3, BACKWARD), place(schedule, Kind.FINISH, 3, BACKWARD)
    gather = next(i for i, _ in schedule.of(Kind.UNSHARD, phase=BACKWARD) if i > freed)
    of_their_own = SlotRange(schedule.arena_bytes, schedule.events[taken].bytes)
    schedule = change(change(schedule, taken, slot=of_their_own), gather, slot=of_their_own, waits_for=())
    return replace(schedule, arena_bytes=of_their_own.end), gather


@breaks("buckets_exist")
def a_bucket_that_is_not_there() -> Broken:
    schedule = zero3()
    return change(schedule, 4, bucket_index=17), 4
