"""The rule about scales of float8 weights, one mutation of a planned schedule for each thing it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fxshard
from fxshard.schedule.events import Event, Kind, Phase
from fxshard.schedule.scales import scales_come_first
from fxshard.schedule.schedule import Schedule
from tests.precision.nets import net


@pytest.fixture(scope="module")
def planned() -> Schedule:
    x = torch.zeros(2, 8, dtype=torch.int64)
    return fxshard.plan(net(), (x, x), world_size=4, zero=3, precision=fxshard.Float8(smallest=0), lowering="eager")


def broken(schedule: Schedule, events: list[Event]) -> str:
    with pytest.raises(fxshard.ScheduleError) as found:
        replace(schedule, events=tuple(events)).verify()
    assert found.value.rule == scales_come_first.__name__
    return str(found.value)


@pytest.mark.shows("P1", "F3")
def test_scales_are_one_event_before_all_gathers(planned: Schedule) -> None:
    planned.verify()
    (first, *rest) = planned.events
    assert first.kind is Kind.SCALES and not any(event.kind is Kind.SCALES for event in rest)
    assert first.bytes == 16 * len(first.params) == 64  # a scale for each weight, and room up to the next 16 bytes
    assert fxshard.Schedule.from_json(planned.to_json()) == planned
    assert planned.accumulating().events[0].kind is Kind.SCALES
    planned.accumulating().verify()
    assert planned.simulate("h200").step_seconds > 0


@pytest.mark.shows("P1")
def test_a_gather_without_scales(planned: Schedule) -> None:
    without = replace(planned.events[0], reads=planned.events[0].reads[:1])
    assert "whose scales no event before it makes" in broken(planned, [without, *planned.events[1:]])


@pytest.mark.shows("P1")
def test_a_gather_that_does_not_wait_for_scales(planned: Schedule) -> None:
    quantized = planned.events[0].reads
    at = next(i for i, event in planned.of(Kind.UNSHARD, phase=Phase.FORWARD) if event.bucket_index in quantized)
    events = list(planned.events)
    events[at] = replace(events[at], waits_for=())
    assert "does not wait for the scales of event 0" in broken(planned, events)


@pytest.mark.shows("P1")
def test_scales_made_twice(planned: Schedule) -> None:
    assert "scales weights again" in broken(planned, [*planned.events, planned.events[0]])
