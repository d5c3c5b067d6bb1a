"""Schedules of quantized gathers that are broken on purpose: each rule catches its fault and names the event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

import fxshard
from fxshard.planner.gather_modes import Copies
from fxshard.schedule.events import Event, Kind, Phase
from fxshard.schedule.staging_rules import staging_and_gradients_take_turns
from fxshard.schedule.step import Step
from tests.precision.nets import net
from tests.training import with_debug


@cache
def planned(zero: int, prefetch: int = 1, optimizer: fxshard.AdamW | None = None) -> fxshard.Schedule:
    x = torch.zeros(2, 8, dtype=torch.int64)
    options = {"precision": fxshard.MXFP8(), "lowering": "eager", "prefetch": prefetch, "optimizer": optimizer}
    return fxshard.plan(net(), (x, x), world_size=2, zero=zero, **with_debug(options))  # type: ignore[arg-type]


def find(schedule: fxshard.Schedule, kind: Kind, phase: Phase) -> tuple[int, Event]:
    """The first such event of a bucket of quantized weights."""
    return next(found for found in schedule.of(kind, phase=phase) if schedule.buckets[found[1].bucket_index].quantized)


def same_bucket(schedule: fxshard.Schedule, index: int, *kinds: Kind) -> list[Event]:
    """An event of each kind, to be put elsewhere: what it waits for stands in other places there."""
    found = [next(e for _, e in schedule.of(kind) if e.bucket_index == index) for kind in kinds]
    return [replace(event, waits_for=()) for event in found]


def edited(schedule: fxshard.Schedule, edit: Callable[[list[Event]], Sequence[Event]]) -> fxshard.Schedule:
    return replace(schedule, events=tuple(edit(list(schedule.events))))


def with_event(schedule: fxshard.Schedule, i: int, **changes: object) -> fxshard.Schedule:
    return edited(schedule, lambda events: [*events[:i], replace(events[i], **changes), *events[i + 1 :]])  # type: ignore[arg-type]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_is_planned_is_fine(zero: int) -> None:
    planned(zero).verify()


@pytest.mark.shows("Q5")
@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_written_between_stage_and_wait(zero: int) -> None:
    schedule = planned(zero)
    at, staged = find(schedule, Kind.UNSHARD, Phase.FORWARD)
    gradient = same_bucket(schedule, staged.bucket_index, Kind.GRAD, Kind.REDUCE, Kind.FINISH)
    broken = edited(schedule, lambda events: [*events[: at + 1], *gradient, *events[at + 1 :]])
    with pytest.raises(fxshard.ScheduleError, match=f"event {at + 1} .* writes gradients where event {at} has staged"):
        broken.verify()


@pytest.mark.shows("Q5")
@pytest.mark.parametrize("zero", [1, 2])
def test_staging_where_gradients_are_held(zero: int) -> None:
    schedule = planned(zero)
    at, held = find(schedule, Kind.GRAD, Phase.BACKWARD)
    (gather,) = same_bucket(schedule, held.bucket_index, Kind.UNSHARD)
    broken = edited(schedule, lambda events: [*events[: at + 1], gather, *events[at + 1 :]])
    with pytest.raises(fxshard.ScheduleError, match=f"event {at + 1} .* stages parameters where event {at} holds"):
        staging_and_gradients_take_turns(Step(broken))


def test_two_buckets_staged_in_one_place() -> None:
    schedule = planned(2, prefetch=4)
    staged = [(i, e) for i, e in schedule.of(Kind.UNSHARD) if schedule.buckets[e.bucket_index].staged]
    (_, first), (at, _) = staged[:2]
    # The second starts before the first is waited for: several gathers run ahead.
    broken = with_event(schedule, at, slot=first.slot)
    with pytest.raises(fxshard.ScheduleError, match=f"no_arena_overlap: event {at} "):
        broken.verify()


def test_staging_without_a_place() -> None:
    schedule = planned(2)
    at, _ = find(schedule, Kind.UNSHARD, Phase.FORWARD)
    with pytest.raises(fxshard.ScheduleError, match=f"event {at} .* has no place in the arena"):
        with_event(schedule, at, slot=None).verify()


@pytest.mark.shows("Q7")
@pytest.mark.parametrize("more", [-64, 64])
def test_staging_in_a_place_that_is_not_its_own(more: int) -> None:
    schedule = planned(2)
    at, event = find(schedule, Kind.UNSHARD, Phase.FORWARD)
    assert event.slot is not None
    other = replace(event.slot, bytes=event.slot.bytes + more)
    with pytest.raises(fxshard.ScheduleError, match=f"staging_keeps_to_its_bytes: event {at} .* in a place of"):
        with_event(schedule, at, slot=other).verify()


def test_the_step_before_gathers_the_wrong_copy() -> None:
    schedule = planned(3, prefetch=4, optimizer=fxshard.AdamW())
    at, event = find(schedule, Kind.UNSHARD, Phase.OPTIMIZER)  # the next forward starts with it
    assert event.copies is Copies.ROWWISE
    with pytest.raises(fxshard.ScheduleError, match=f"wants rowwise, but event {at} brings columnwise"):
        with_event(schedule, at, copies=Copies.COLUMNWISE).verify()


def test_backward_gathers_the_wrong_copy() -> None:
    schedule = planned(3)
    at, _ = find(schedule, Kind.UNSHARD, Phase.BACKWARD)
    with pytest.raises(fxshard.ScheduleError, match=f"wants columnwise, but event {at} brings rowwise"):
        with_event(schedule, at, copies=Copies.ROWWISE).verify()


def test_a_gather_of_other_bytes_than_its_copies() -> None:
    schedule = planned(3)
    at, event = find(schedule, Kind.UNSHARD, Phase.FORWARD)
    with pytest.raises(fxshard.ScheduleError, match=f"event {at} .* is to bring rowwise"):
        with_event(schedule, at, bytes=event.bytes - 64).verify()


def test_quantized_schedules_survive_a_file() -> None:
    for zero in (1, 2, 3):
        schedule = planned(zero)
        assert fxshard.Schedule.from_json(schedule.to_json()) == schedule


def test_an_optimizer_gather_of_a_staged_bucket_is_the_next_steps() -> None:
    """A gather that starts behind the update holds its staging buffer until the next step's wait."""
    schedule = planned(2)
    at, event = find(schedule, Kind.UNSHARD, Phase.FORWARD)
    update = next(i for i, e in schedule.of(Kind.UPDATE) if e.bucket_index == event.bucket_index)
    carried = replace(event, phase=Phase.OPTIMIZER, waits_for=(update - 1,))
    moved = edited(
        schedule, lambda events: [*events[:at], *events[at + 1 : update + 1], carried, *events[update + 1 :]]
    )
    gradients = [i for i, e in moved.of(Kind.GRAD) if e.slot is not None and _overlap(e, event)]
    assert gradients  # it shares memory with gradients of this step: fine, since it is gathered behind them
    staging_and_gradients_take_turns(Step(moved))


def _overlap(a: Event, b: Event) -> bool:
    assert a.slot is not None and b.slot is not None
    return a.slot.offset < b.slot.end and b.slot.offset < a.slot.end
