"""verify: what is right passes, and each rule catches the mutation it is there for, with the event named."""

import pickle
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.errors import FxshardError
from fxshard.events import Event, Kind, Phase
from fxshard.inspect.schedule import Schedule
from fxshard.inspect.verify import RULES, ScheduleError, Step, verify
from fxshard.plan.memory import SlotRange
from tests.inspect.schedules import change, evaluation, place, relinked, zero3

FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER

Broken = tuple[Schedule, int]
"""A schedule, and the position of the event that the error must name."""


def _moved(schedule: Schedule, source: int, target: int) -> list[Event]:
    events = list(schedule.events)
    events.insert(target, events.pop(source))
    return events


def _without(schedule: Schedule, i: int) -> Schedule:
    return relinked(schedule, [event for at, event in enumerate(schedule.events) if at != i])


def _with(schedule: Schedule, at: int, event: Event) -> Schedule:
    events = list(schedule.events)
    events.insert(at, event)
    return relinked(schedule, events)


# -- one mutation or more per rule -------------------------------------------------------------------------------------


def released_before_a_read() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.RESHARD, 0, FORWARD)
    return relinked(schedule, _moved(schedule, at, at - 1)), at


def read_before_the_wait() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.WAIT, 1, BACKWARD)
    read = next(i for i, event in enumerate(schedule.events) if i > at and event.reads)
    return relinked(schedule, _moved(schedule, at, read)), read - 1


def read_of_what_is_never_gathered() -> Broken:
    schedule = zero3()
    bucket = schedule.events[place(schedule, Kind.UNSHARD, 2, FORWARD)].bucket_index
    return change(schedule, 3, reads=(*schedule.events[3].reads, bucket)), 3


def no_wait() -> Broken:
    schedule = zero3()
    return _without(schedule, place(schedule, Kind.WAIT, 0, BACKWARD)), place(schedule, Kind.RESHARD, 0, BACKWARD) - 1


def wait_twice() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.WAIT, 0, FORWARD)
    return _with(schedule, at, schedule.events[at]), at + 1


def no_unshard() -> Broken:
    schedule = zero3()
    return _without(schedule, place(schedule, Kind.UNSHARD, 0, BACKWARD)), place(schedule, Kind.WAIT, 0, BACKWARD) - 1


def no_reshard() -> Broken:
    schedule = zero3()
    return _without(schedule, place(schedule, Kind.RESHARD, 0, BACKWARD)), place(schedule, Kind.UNSHARD, 0, BACKWARD)


def reshard_twice() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.RESHARD, 0, FORWARD)
    return _with(schedule, at, schedule.events[at]), at + 1


def reshard_of_a_resident_bucket() -> Broken:
    schedule = zero3(zero=2)
    at = place(schedule, Kind.WAIT, 0, BACKWARD) + 2
    return _with(schedule, at, replace(schedule.events[at - 2], kind=Kind.RESHARD)), at


def gathered_twice() -> Broken:
    schedule = zero3()
    unshard, wait = place(schedule, Kind.UNSHARD, 1, FORWARD), place(schedule, Kind.WAIT, 1, FORWARD)
    return _with(schedule, wait, schedule.events[unshard]), wait


def gathered_again_though_kept() -> Broken:
    schedule = zero3()
    wait = place(schedule, Kind.WAIT, 2, BACKWARD)
    return _with(schedule, wait, replace(schedule.events[wait], kind=Kind.UNSHARD)), wait


def kept_by_mistake() -> Broken:
    schedule = zero3()
    return _without(schedule, place(schedule, Kind.RESHARD, 0, FORWARD)), place(schedule, Kind.UNSHARD, 0, BACKWARD) - 1


def resident_gathered_twice() -> Broken:
    schedule = zero3(zero=1)
    at = place(schedule, Kind.WAIT, 1, BACKWARD)
    return _with(schedule, at, replace(schedule.events[at], kind=Kind.UNSHARD)), at


def reduced_before_the_last_write() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD)
    return relinked(schedule, _moved(schedule, at, at - 2)), at - 2


def written_while_reduced() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD)
    return _with(schedule, at + 1, schedule.events[at - 2]), at


def never_reduced() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 0, BACKWARD)
    finish = place(schedule, Kind.FINISH, 0, BACKWARD)
    return _without(schedule, at), finish - 1


def reduced_twice() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD)
    return _with(schedule, at, schedule.events[at]), at + 1


def never_finished() -> Broken:
    schedule = zero3()
    return _without(schedule, place(schedule, Kind.FINISH, 0, BACKWARD)), place(schedule, Kind.GRAD, 0, BACKWARD)


def written_after_the_end() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.FINISH, 0, BACKWARD) + 1
    write = place(schedule, Kind.GRAD, 0, BACKWARD) + 1
    return _with(schedule, at, schedule.events[write]), at


def taken_again_while_reduced() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD) + 1
    return _with(schedule, at, schedule.events[place(schedule, Kind.GRAD, 1, BACKWARD)]), at


def a_third_gradient_bucket() -> Broken:
    schedule = zero3()
    finish, grad = place(schedule, Kind.FINISH, 2, BACKWARD), place(schedule, Kind.GRAD, 0, BACKWARD)
    return relinked(schedule, _moved(schedule, finish, grad)), grad - 1


def kept_before_the_last_write() -> Broken:
    schedule = zero3().accumulating()
    at = place(schedule, Kind.ACCUMULATE, 1, BACKWARD)
    return relinked(schedule, _moved(schedule, at, at - 2)), at - 2


def neither_kept_nor_reduced() -> Broken:
    schedule = zero3().accumulating()
    at = place(schedule, Kind.ACCUMULATE, 0, BACKWARD)
    return _without(schedule, at), place(schedule, Kind.FINISH, 0, BACKWARD) - 1


def kept_and_reduced() -> Broken:
    schedule = zero3().accumulating()
    at = place(schedule, Kind.ACCUMULATE, 1, BACKWARD)
    return _with(schedule, at, replace(schedule.events[at], kind=Kind.REDUCE)), at + 1


def updated_though_only_kept() -> Broken:
    schedule = zero3().accumulating()
    update = replace(zero3().events[-1], waits_for=())
    return replace(schedule, events=(*schedule.events, update)), len(schedule.events)


def gather_does_not_wait_for_the_place_of_kept_gradients() -> Broken:
    schedule = zero3(layers=4, prefetch=0).accumulating()
    taken, freed = place(schedule, Kind.GRAD, 3, BACKWARD), place(schedule, Kind.FINISH, 3, BACKWARD)
    gather = next(i for i, _ in schedule.of(Kind.UNSHARD, phase=BACKWARD) if i > freed)
    of_their_own = SlotRange(schedule.arena_bytes, schedule.events[taken].bytes)
    schedule = change(change(schedule, taken, slot=of_their_own), gather, slot=of_their_own, waits_for=())
    return replace(schedule, arena_bytes=of_their_own.end), gather


def replicas_not_added_up() -> Broken:
    schedule = zero3(replicas=2)
    return _without(schedule, place(schedule, Kind.ALL_REDUCE, 1, BACKWARD)), place(
        schedule, Kind.FINISH, 1, BACKWARD
    ) - 1


def replicas_added_up_twice() -> Broken:
    schedule = zero3(replicas=2)
    at = place(schedule, Kind.ALL_REDUCE, 1, BACKWARD)
    return _with(schedule, at, schedule.events[at]), at + 1


def replicas_added_up_before_the_reduction() -> Broken:
    schedule = zero3(replicas=2)
    at = place(schedule, Kind.ALL_REDUCE, 1, BACKWARD)
    return relinked(schedule, _moved(schedule, at, at - 1)), at - 1


def replicas_added_up_where_there_are_none() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD)
    return _with(schedule, at + 1, replace(schedule.events[at], kind=Kind.ALL_REDUCE)), at + 1


def update_does_not_wait_for_the_replicas() -> Broken:
    schedule = zero3(replicas=2)
    at, added = place(schedule, Kind.UPDATE, 1, OPTIMIZER), place(schedule, Kind.ALL_REDUCE, 1, BACKWARD)
    return change(schedule, at, waits_for=tuple(set(schedule.events[at].waits_for) - {added})), at


def replicas_do_not_wait_for_the_reduction() -> Broken:
    schedule = zero3(replicas=2)
    at = place(schedule, Kind.ALL_REDUCE, 1, BACKWARD)
    return change(schedule, at, waits_for=()), at


def no_update() -> Broken:
    schedule = zero3()
    return _without(schedule, place(schedule, Kind.UPDATE, 1, OPTIMIZER)), place(schedule, Kind.REDUCE, 1, BACKWARD)


def updated_twice() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.UPDATE, 1, OPTIMIZER)
    return _with(schedule, at, schedule.events[at]), at + 1


def updated_before_reduced() -> Broken:
    schedule = zero3()
    update, reduce = place(schedule, Kind.UPDATE, 0, OPTIMIZER), place(schedule, Kind.REDUCE, 0, BACKWARD)
    return relinked(schedule, _moved(schedule, update, reduce)), reduce


def gathered_before_the_update() -> Broken:
    schedule = zero3(carry=1)
    unshard, update = place(schedule, Kind.UNSHARD, 0, OPTIMIZER), place(schedule, Kind.UPDATE, 0, OPTIMIZER)
    return relinked(schedule, _moved(schedule, unshard, update)), update


def gathered_without_waiting_for_the_update() -> Broken:
    schedule = zero3(carry=1)
    at = place(schedule, Kind.UNSHARD, 0, OPTIMIZER)
    return change(schedule, at, waits_for=()), at


def _exchanging() -> Schedule:
    """A step whose bucket 1 has a matrix that travels: there, computed, back, then the update."""
    schedule = zero3()
    at = place(schedule, Kind.UPDATE, 1, OPTIMIZER)
    update = schedule.events[at]
    index = update.bucket_index
    about = {"bucket": "", "bucket_index": -1, "params": ("w",), "phase": OPTIMIZER, "slot": None, "traffic": 0}
    last_reduce = max(i for i, event in enumerate(schedule.events) if event.kind is Kind.REDUCE)
    there = replace(update, kind=Kind.EXCHANGE, reads=(index,), stream="gather", waits_for=(last_reduce,), **about)
    compute = replace(update, kind=Kind.COMPUTE, reads=(), waits_for=(at,), **about)
    back = replace(there, writes=(index,), waits_for=(at + 1,))
    behind = [replace(e, waits_for=tuple(n + 3 if n >= at else n for n in e.waits_for)) for e in schedule.events[at:]]
    behind[0] = replace(behind[0], waits_for=(*behind[0].waits_for, at + 2))
    return replace(schedule, events=(*schedule.events[:at], there, compute, back, *behind))


def _exchange_place(schedule: Schedule, which: int) -> int:
    return [i for i, event in enumerate(schedule.events) if event.params == ("w",)][which]


def sent_before_reduced() -> Broken:
    schedule = _exchanging()
    at = _exchange_place(schedule, 0)
    return change(schedule, at, waits_for=()), at


def computed_before_it_arrived() -> Broken:
    schedule = _exchanging()
    at = _exchange_place(schedule, 1)
    return change(schedule, at, waits_for=()), at


def sent_back_uncomputed() -> Broken:
    schedule = _exchanging()
    at = _exchange_place(schedule, 2)
    return change(schedule, at, waits_for=schedule.events[at - 1].waits_for), at


def updated_before_it_came_back() -> Broken:
    schedule = _exchanging()
    at = place(schedule, Kind.UPDATE, 1, OPTIMIZER)
    back = _exchange_place(schedule, 2)
    return change(schedule, at, waits_for=tuple(n for n in schedule.events[at].waits_for if n != back)), at


def never_sent_back() -> Broken:
    schedule = _exchanging()
    at = _exchange_place(schedule, 2)
    return change(schedule, at, writes=()), at


def two_buffers_in_one_place() -> Broken:
    schedule = zero3()
    first, second = place(schedule, Kind.UNSHARD, 0, FORWARD), place(schedule, Kind.UNSHARD, 1, FORWARD)
    return change(schedule, second, slot=schedule.events[first].slot), second


def a_gradient_in_the_place_of_a_kept_bucket() -> Broken:
    schedule = zero3()
    kept, grad = place(schedule, Kind.UNSHARD, 2, FORWARD), place(schedule, Kind.GRAD, 2, BACKWARD)
    return change(schedule, grad, slot=schedule.events[kept].slot), grad


def two_buffers_share_a_byte() -> Broken:
    schedule = zero3()
    first, second = place(schedule, Kind.UNSHARD, 0, FORWARD), place(schedule, Kind.UNSHARD, 1, FORWARD)
    slot = schedule.events[first].slot
    assert slot is not None
    moved = SlotRange(slot.end - 1, slot.bytes)
    return replace(change(schedule, second, slot=moved), arena_bytes=10**6), second


def beyond_the_arena() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.UNSHARD, 0, FORWARD)
    slot = schedule.events[at].slot
    assert slot is not None
    return change(schedule, at, slot=SlotRange(schedule.arena_bytes - slot.bytes + 1, slot.bytes)), at


def a_place_too_small() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.GRAD, 0, BACKWARD)
    slot = schedule.events[at].slot
    assert slot is not None
    return change(schedule, at, slot=SlotRange(slot.offset, slot.bytes - 1)), at


def no_place() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.GRAD, 0, BACKWARD)
    return change(schedule, at, slot=None), at


def a_place_for_what_stays_elsewhere() -> Broken:
    schedule = zero3(zero=1)
    at = place(schedule, Kind.GRAD, 0, BACKWARD)
    return replace(change(schedule, at, slot=SlotRange(0, 4096)), arena_bytes=4096), at


def over_budget() -> Broken:
    schedule = zero3()
    return replace(schedule, budget=schedule.peak_bytes - 1), _peak_at(schedule)


def shards_that_are_not_counted() -> Broken:
    schedule = zero3()
    return replace(schedule, resident_bytes=0), _peak_at(schedule)


def _peak_at(schedule: Schedule) -> int:
    held, totals = 0, dict[int, int]()
    for i, slot, taken in Step(schedule).lives():
        held += slot.bytes if taken else -slot.bytes
        totals.setdefault(held, i)
    return totals[max(totals)]


def waits_for_the_future() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.WAIT, 0, FORWARD)
    return change(schedule, at, waits_for=(*schedule.events[at].waits_for, at + 1)), at


def wait_does_not_wait() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.WAIT, 1, FORWARD)
    return change(schedule, at, waits_for=()), at


def reduction_does_not_wait_for_the_write() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.REDUCE, 1, BACKWARD)
    last = max(schedule.events[at].waits_for)
    return change(schedule, at, waits_for=tuple(set(schedule.events[at].waits_for) - {last})), at


def update_does_not_wait() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.UPDATE, 1, OPTIMIZER)
    return change(schedule, at, waits_for=()), at


def gather_does_not_wait_for_its_place() -> Broken:
    schedule = zero3(layers=4, keep_last=False)
    at = next(i for i, event in schedule.of(Kind.UNSHARD) if event.waits_for)
    return change(schedule, at, waits_for=()), at


def gradient_does_not_wait_for_its_place() -> Broken:
    schedule = zero3(layers=4)
    at = place(schedule, Kind.GRAD, 1, BACKWARD)
    return change(schedule, at, waits_for=()), at


def a_bucket_that_is_not_there() -> Broken:
    schedule = zero3()
    return change(schedule, 4, bucket_index=17), 4


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
    "no_double_gather": (gathered_twice, gathered_again_though_kept, kept_by_mistake, resident_gathered_twice),
    "reduce_after_all_writes": (
        reduced_before_the_last_write,
        written_while_reduced,
        never_reduced,
        reduced_twice,
        never_finished,
        kept_before_the_last_write,
        neither_kept_nor_reduced,
        kept_and_reduced,
    ),
    "not_rewritten_before_reduced": (written_after_the_end, taken_again_while_reduced),
    "replicas_are_added_up_once": (
        replicas_not_added_up,
        replicas_added_up_twice,
        replicas_added_up_before_the_reduction,
        replicas_added_up_where_there_are_none,
        update_does_not_wait_for_the_replicas,
    ),
    "at_most_two_gradient_buckets": (a_third_gradient_bucket,),
    "every_reduced_bucket_is_updated_once": (
        no_update,
        updated_twice,
        updated_before_reduced,
        updated_though_only_kept,
    ),
    "gather_after_update": (gathered_before_the_update, gathered_without_waiting_for_the_update),
    "exchanges_go_there_and_back": (
        sent_before_reduced,
        computed_before_it_arrived,
        sent_back_uncomputed,
        updated_before_it_came_back,
        never_sent_back,
    ),
    "no_arena_overlap": (
        two_buffers_in_one_place,
        a_gradient_in_the_place_of_a_kept_bucket,
        two_buffers_share_a_byte,
        beyond_the_arena,
        a_place_too_small,
        no_place,
        a_place_for_what_stays_elsewhere,
    ),
    "peak_is_what_it_says": (over_budget, shards_that_are_not_counted),
    "dependencies_point_backwards": (
        waits_for_the_future,
        wait_does_not_wait,
        reduction_does_not_wait_for_the_write,
        update_does_not_wait,
        replicas_do_not_wait_for_the_reduction,
        gather_does_not_wait_for_its_place,
        gradient_does_not_wait_for_its_place,
        gather_does_not_wait_for_the_place_of_kept_gradients,
    ),
    "buckets_exist": (a_bucket_that_is_not_there,),
}


def test_a_step_with_an_exchange_passes() -> None:
    verify(_exchanging())


@pytest.mark.shows("P1")
@pytest.mark.parametrize(
    ("rule", "mutation"),
    [pytest.param(rule, make, id=f"{rule}-{make.__name__}") for rule, all_of in MUTATIONS.items() for make in all_of],
)
def test_a_mutation_is_caught_by_its_rule_with_the_event_named(rule: str, mutation: Callable[[], Broken]) -> None:
    schedule, index = mutation()
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    event, message = schedule.events[index], str(caught.value)
    assert (caught.value.rule, caught.value.index) == (rule, index), message
    assert message.startswith(f"{rule}: event {index} ({event.phase} {event.kind}")
    assert event.bucket in message


@pytest.mark.shows("P1")
def test_every_rule_has_a_mutation() -> None:
    # tests/precision/test_verify_staging.py
    elsewhere = {"staging_and_gradients_take_turns", "staging_keeps_to_its_bytes", "waits_get_their_copies"}
    assert {rule.__name__ for rule in RULES} | {"buckets_exist"} == set(MUTATIONS) | elsewhere


@pytest.mark.shows("P1")
@given(
    layers=st.integers(1, 7),
    ranks=st.sampled_from([1, 2, 3, 8, 1024]),
    prefetch=st.integers(0, 4),
    keep_last=st.booleans(),
    carry=st.integers(0, 3),
    zero=st.integers(0, 3),
    replicas=st.integers(1, 2),
)
def test_valid_schedules_pass(
    layers: int, ranks: int, prefetch: int, keep_last: bool, carry: int, zero: int, replicas: int
) -> None:
    schedule = zero3(layers, ranks, prefetch=prefetch, keep_last=keep_last, carry=carry, zero=zero, replicas=replicas)
    verify(schedule)
    verify(replace(schedule, budget=schedule.peak_bytes))
    verify(schedule.accumulating())
    verify(evaluation(layers, ranks, prefetch=prefetch, zero=zero))


def test_an_empty_schedule_passes() -> None:
    schedule = zero3()
    verify(replace(schedule, events=()))


def test_the_error_is_one_of_ours_and_survives_a_process_boundary() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(no_reshard()[0])
    assert isinstance(caught.value, FxshardError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, ScheduleError)
    assert (str(copy), copy.rule, copy.index) == (str(caught.value), caught.value.rule, caught.value.index)


def test_the_cost_is_linear_in_layers() -> None:
    times = {}
    for layers in (100, 400):
        schedule = zero3(layers, 8, prefetch=3)
        start = time.process_time()
        verify(schedule)
        times[layers] = time.process_time() - start
    assert times[400] < 12 * max(times[100], 1e-3)  # four times the work; the rest is a busy machine
