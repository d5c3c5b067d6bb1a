"""Mutations of the optimizer phase."""

from dataclasses import replace

from fxshard.schedule.events import Kind
from fxshard.schedule.schedule import Schedule
from tests.inspect.mutations.editing import (
    BACKWARD,
    OPTIMIZER,
    Broken,
    breaks,
    changed,
    missing,
    moved,
    not_waiting_for,
    to_the_place_of,
    twice,
    waiting_for_nothing,
)
from tests.inspect.schedules import change, place, relinked, zero3


def exchanging() -> Schedule:
    """A step whose matrices travel: there, computed, back, then the updates."""
    return zero3(muon=True)


def exchanging_parts() -> Schedule:
    """Also over tensor-parallel ranks, between there and back; and the next step's gathers follow."""
    return zero3(muon=True, tensor=2, carry=2)


def _exchange_place(schedule: Schedule, which: int) -> int:
    kinds = (Kind.EXCHANGE, Kind.COMPUTE)
    return [i for i, event in enumerate(schedule.events) if event.phase is OPTIMIZER and event.kind in kinds][which]


def _waits_for_nothing(schedule: Schedule, which: int) -> Broken:
    return waiting_for_nothing(schedule, _exchange_place(schedule, which))


@breaks(
    "every_reduced_bucket_is_updated_once",
    no_update=lambda: missing(zero3(), (Kind.UPDATE, 1, OPTIMIZER), (Kind.REDUCE, 1, BACKWARD)),
    updated_twice=lambda: twice(zero3(), Kind.UPDATE, 1, OPTIMIZER),
)
def updated_before_reduced() -> Broken:
    schedule = zero3()
    reduce = place(schedule, Kind.REDUCE, 0, BACKWARD)
    return to_the_place_of(schedule, (Kind.UPDATE, 0, OPTIMIZER), (Kind.REDUCE, 0, BACKWARD)), reduce


@breaks("every_reduced_bucket_is_updated_once")
def updated_though_only_kept() -> Broken:
    schedule = zero3().accumulating()
    update = replace(zero3().events[-1], waits_for=())
    return replace(schedule, events=(*schedule.events, update)), len(schedule.events)


@breaks(
    "gather_after_update",
    gathered_without_waiting_for_the_update=lambda: changed(zero3(carry=1), Kind.UNSHARD, 0, OPTIMIZER, waits_for=()),
)
def gathered_before_the_update() -> Broken:
    schedule = zero3(carry=1)
    update = place(schedule, Kind.UPDATE, 0, OPTIMIZER)
    return to_the_place_of(schedule, (Kind.UNSHARD, 0, OPTIMIZER), (Kind.UPDATE, 0, OPTIMIZER)), update


@breaks(
    "exchanges_go_there_and_back",
    sent_before_reduced=lambda: _waits_for_nothing(exchanging(), 0),
    computed_before_it_arrived=lambda: _waits_for_nothing(exchanging(), 1),
    parts_computed_before_they_arrived=lambda: _waits_for_nothing(exchanging_parts(), 2),
)
def sent_back_uncomputed() -> Broken:
    schedule = exchanging()
    at = _exchange_place(schedule, 2)
    return change(schedule, at, waits_for=schedule.events[at - 1].waits_for), at


@breaks("exchanges_go_there_and_back")
def updated_before_it_came_back() -> Broken:
    schedule = exchanging()
    return not_waiting_for(schedule, place(schedule, Kind.UPDATE, 1, OPTIMIZER), _exchange_place(schedule, 2))


@breaks("exchanges_go_there_and_back")
def never_sent_back() -> Broken:
    schedule = exchanging()
    at = _exchange_place(schedule, 2)
    return change(schedule, at, writes=()), at


@breaks("exchanges_go_there_and_back")
def parts_sent_before_they_came() -> Broken:
    """To tensor-parallel ranks, before data-parallel ones have sent them."""
    schedule = exchanging_parts()
    there = _exchange_place(schedule, 0)
    return relinked(schedule, moved(schedule, there + 1, there)), there + 1


@breaks("exchanges_go_there_and_back")
def sent_back_without_the_parts() -> Broken:
    """To data-parallel ranks, before what tensor-parallel ones have sent is there."""
    schedule = exchanging_parts()
    at = _exchange_place(schedule, 5)
    events = [event for i, event in enumerate(schedule.events) if i not in (at - 1, at - 2)]
    return relinked(schedule, events), at - 2


@breaks("exchanges_have_one_order")
def gathered_in_another_order() -> Broken:
    """Between the exchanges of matrices, which run in the same process group."""
    schedule = exchanging_parts()
    first, second = [place(schedule, Kind.UNSHARD, layer, OPTIMIZER) for layer in (0, 1)]
    return relinked(schedule, moved(schedule, first, second)), second - 1
