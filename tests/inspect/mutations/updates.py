"""Mutations of the optimizer phase."""

from collections.abc import Callable
from dataclasses import replace

from fxshard.schedule.events import Kind
from fxshard.schedule.schedule import Schedule
from tests.inspect.mutations.editing import BACKWARD, OPTIMIZER, Broken, missing, moved, twice, waiting_for_nothing
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


def no_update() -> Broken:
    return missing(zero3(), (Kind.UPDATE, 1, OPTIMIZER), (Kind.REDUCE, 1, BACKWARD))


def updated_twice() -> Broken:
    return twice(zero3(), Kind.UPDATE, 1, OPTIMIZER)


def updated_before_reduced() -> Broken:
    schedule = zero3()
    update, reduce = place(schedule, Kind.UPDATE, 0, OPTIMIZER), place(schedule, Kind.REDUCE, 0, BACKWARD)
    return relinked(schedule, moved(schedule, update, reduce)), reduce


def updated_though_only_kept() -> Broken:
    schedule = zero3().accumulating()
    update = replace(zero3().events[-1], waits_for=())
    return replace(schedule, events=(*schedule.events, update)), len(schedule.events)


def gathered_before_the_update() -> Broken:
    schedule = zero3(carry=1)
    unshard, update = place(schedule, Kind.UNSHARD, 0, OPTIMIZER), place(schedule, Kind.UPDATE, 0, OPTIMIZER)
    return relinked(schedule, moved(schedule, unshard, update)), update


def gathered_without_waiting_for_the_update() -> Broken:
    schedule = zero3(carry=1)
    return waiting_for_nothing(schedule, place(schedule, Kind.UNSHARD, 0, OPTIMIZER))


def sent_before_reduced() -> Broken:
    schedule = exchanging()
    return waiting_for_nothing(schedule, _exchange_place(schedule, 0))


def computed_before_it_arrived() -> Broken:
    schedule = exchanging()
    return waiting_for_nothing(schedule, _exchange_place(schedule, 1))


def sent_back_uncomputed() -> Broken:
    schedule = exchanging()
    at = _exchange_place(schedule, 2)
    return change(schedule, at, waits_for=schedule.events[at - 1].waits_for), at


def updated_before_it_came_back() -> Broken:
    schedule = exchanging()
    at = place(schedule, Kind.UPDATE, 1, OPTIMIZER)
    back = _exchange_place(schedule, 2)
    return change(schedule, at, waits_for=tuple(n for n in schedule.events[at].waits_for if n != back)), at


def never_sent_back() -> Broken:
    schedule = exchanging()
    at = _exchange_place(schedule, 2)
    return change(schedule, at, writes=()), at


def parts_computed_before_they_arrived() -> Broken:
    schedule = exchanging_parts()
    return waiting_for_nothing(schedule, _exchange_place(schedule, 2))


def parts_sent_before_they_came() -> Broken:
    """To tensor-parallel ranks, before data-parallel ones have sent them."""
    schedule = exchanging_parts()
    there = _exchange_place(schedule, 0)
    return relinked(schedule, moved(schedule, there + 1, there)), there + 1


def sent_back_without_the_parts() -> Broken:
    """To data-parallel ranks, before what tensor-parallel ones have sent is there."""
    schedule = exchanging_parts()
    at = _exchange_place(schedule, 5)
    events = [event for i, event in enumerate(schedule.events) if i not in (at - 1, at - 2)]
    return relinked(schedule, events), at - 2


def gathered_in_another_order() -> Broken:
    """Between the exchanges of matrices, which run in the same process group."""
    schedule = exchanging_parts()
    first, second = [place(schedule, Kind.UNSHARD, layer, OPTIMIZER) for layer in (0, 1)]
    return relinked(schedule, moved(schedule, first, second)), second - 1


MUTATIONS: dict[str, tuple[Callable[[], Broken], ...]] = {
    "every_reduced_bucket_is_updated_once": (
        no_update,
        updated_twice,
        updated_before_reduced,
        updated_though_only_kept,
    ),
    "gather_after_update": (
        gathered_before_the_update,
        gathered_without_waiting_for_the_update,
    ),
    "exchanges_go_there_and_back": (
        sent_before_reduced,
        computed_before_it_arrived,
        sent_back_uncomputed,
        updated_before_it_came_back,
        never_sent_back,
        parts_computed_before_they_arrived,
        parts_sent_before_they_came,
        sent_back_without_the_parts,
    ),
    "exchanges_have_one_order": (gathered_in_another_order,),
}
