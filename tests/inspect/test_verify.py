"""verify: what is right passes, and each rule catches the mutations it is there for, with the event named."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard._torch.errors import FxshardError
from fxshard.schedule.verify import RULES, ScheduleError, verify
from tests.inspect.mutations import MUTATIONS, collectives, offloads
from tests.inspect.mutations.editing import Broken
from tests.inspect.mutations.gathers import no_reshard
from tests.inspect.mutations.updates import exchanging, exchanging_parts
from tests.inspect.schedules import evaluation, zero3


def test_a_step_with_an_exchange_passes() -> None:
    verify(exchanging())
    verify(exchanging_parts())


def test_a_model_that_communicates_passes() -> None:
    verify(collectives.communicating())


def test_a_step_that_offloads_passes() -> None:
    verify(offloads.offloading())
    verify(offloads.offloading().accumulating())


@pytest.mark.shows("P1", "M6")
@pytest.mark.parametrize(
    ("rule", "mutation"),
    [pytest.param(rule, make, id=f"{rule}-{name}") for rule, of in MUTATIONS.items() for name, make in of.items()],
)
def test_a_mutation_is_caught_by_its_rule_with_the_event_named(rule: str, mutation: Callable[[], Broken]) -> None:
    schedule, index = mutation()
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    message = str(caught.value)
    assert (caught.value.rule, caught.value.index) == (rule, index), message
    if index is None:
        assert message.startswith(f"{rule}: ")
        return
    event = schedule.events[index]
    assert message.startswith(f"{rule}: event {index} ({event.phase} {event.kind}")
    assert event.bucket in message


@pytest.mark.shows("P1")
def test_every_rule_has_a_mutation() -> None:
    # tests/precision/test_verify_staging.py
    elsewhere = {"staging_and_gradients_take_turns", "staging_keeps_to_its_bytes", "waits_get_their_copies"}
    elsewhere |= {"scales_come_first"}  # tests/precision/test_verify_scales.py
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
    verify(replace(schedule, events=(), graphs=(), arena_bytes=0))


def test_the_error_is_one_of_ours_and_survives_a_process_boundary() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(no_reshard()[0])
    assert isinstance(caught.value, FxshardError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, ScheduleError)
    assert (str(copy), copy.rule, copy.index) == (str(caught.value), caught.value.rule, caught.value.index)
