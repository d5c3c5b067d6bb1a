"""Mutations of places in the arena and of what waits for what."""

from dataclasses import replace

from fxshard.planner.memory import SlotRange
from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.verify import Step
from tests.inspect.mutations.editing import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Broken,
    at_event,
    breaks,
    changed,
    not_waiting_for,
    waiting_for_nothing,
)
from tests.inspect.schedules import change, place, zero3


def _peak_at(schedule: Schedule) -> int:
    held, totals = 0, dict[int, int]()
    for i, slot, taken in Step(schedule).lives():
        held += slot.bytes if taken else -slot.bytes
        totals.setdefault(held, i)
    return totals[max(totals)]


def _in_the_place_of(first: tuple[Kind, int, Phase], second: tuple[Kind, int, Phase]) -> Broken:
    schedule = zero3()
    slot = schedule.events[place(schedule, *first)].slot
    return at_event(schedule, second, slot=lambda _: slot)


@breaks(
    "no_arena_overlap",
    two_buffers_in_one_place=lambda: _in_the_place_of((Kind.UNSHARD, 0, FORWARD), (Kind.UNSHARD, 1, FORWARD)),
    in_the_place_of_a_kept_bucket=lambda: _in_the_place_of((Kind.UNSHARD, 2, FORWARD), (Kind.GRAD, 2, BACKWARD)),
    a_place_too_small=lambda: at_event(
        zero3(), (Kind.GRAD, 0, BACKWARD), slot=lambda grad: SlotRange(grad.slot.offset, grad.slot.bytes - 1)
    ),
    no_place=lambda: changed(zero3(), Kind.GRAD, 0, BACKWARD, slot=None),
)
def two_buffers_share_a_byte() -> Broken:
    schedule = replace(zero3(), arena_bytes=10**6)
    slot = schedule.events[place(schedule, Kind.UNSHARD, 0, FORWARD)].slot
    return changed(schedule, Kind.UNSHARD, 1, FORWARD, slot=SlotRange(slot.end - 1, slot.bytes))


@breaks("no_arena_overlap")
def beyond_the_arena() -> Broken:
    schedule = zero3()
    slot = schedule.events[place(schedule, Kind.UNSHARD, 0, FORWARD)].slot
    return changed(
        schedule, Kind.UNSHARD, 0, FORWARD, slot=SlotRange(schedule.arena_bytes - slot.bytes + 1, slot.bytes)
    )


@breaks("no_arena_overlap")
def a_place_for_what_stays_elsewhere() -> Broken:
    return changed(replace(zero3(zero=1), arena_bytes=4096), Kind.GRAD, 0, BACKWARD, slot=SlotRange(0, 4096))


@breaks("peak_is_what_it_says")
def over_budget() -> Broken:
    schedule = zero3()
    return replace(schedule, budget=schedule.peak_bytes - 1), _peak_at(schedule)


@breaks("peak_is_what_it_says")
def shards_that_are_not_counted() -> Broken:
    schedule = zero3()
    return replace(schedule, resident_bytes=0), _peak_at(schedule)


@breaks(
    "dependencies_point_backwards",
    wait_does_not_wait=lambda: changed(zero3(), Kind.WAIT, 1, FORWARD, waits_for=()),
    update_does_not_wait=lambda: changed(zero3(), Kind.UPDATE, 1, OPTIMIZER, waits_for=()),
    replicas_do_not_wait_for_the_reduction=lambda: changed(
        zero3(replicas=2), Kind.ALL_REDUCE, 1, BACKWARD, waits_for=()
    ),
    gradient_does_not_wait_for_its_place=lambda: changed(zero3(layers=4), Kind.GRAD, 1, BACKWARD, waits_for=()),
)
def waits_for_the_future() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.WAIT, 0, FORWARD)
    return change(schedule, at, waits_for=(*schedule.events[at].waits_for, at + 1)), at


@breaks("dependencies_point_backwards")
def reduction_does_not_wait_for_the_write() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD)
    return not_waiting_for(schedule, at, max(schedule.events[at].waits_for))


@breaks("dependencies_point_backwards")
def gather_does_not_wait_for_its_place() -> Broken:
    schedule = zero3(layers=4, keep_last=False)
    return waiting_for_nothing(schedule, next(i for i, event in schedule.of(Kind.UNSHARD) if event.waits_for))


@breaks("dependencies_point_backwards")
def gather_does_not_wait_for_the_place_of_kept_gradients() -> Broken:
    schedule = zero3(layers=4, prefetch=0).accumulating()
    taken, freed = place(schedule, Kind.GRAD, 3, BACKWARD), place(schedule, Kind.FINISH, 3, BACKWARD)
    gather = next(i for i, _ in schedule.of(Kind.UNSHARD, phase=BACKWARD) if i > freed)
    of_their_own = SlotRange(schedule.arena_bytes, schedule.events[taken].bytes)
    schedule = change(change(schedule, taken, slot=of_their_own), gather, slot=of_their_own, waits_for=())
    return replace(schedule, arena_bytes=of_their_own.end), gather


breaks("buckets_exist", a_bucket_that_is_not_there=lambda: (change(zero3(), 4, bucket_index=17), 4))
