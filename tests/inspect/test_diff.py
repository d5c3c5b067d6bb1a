"""What changed between two schedules."""

from dataclasses import replace

import torch

from fxshard.schedule.diff import _longest_increasing, diff
from fxshard.schedule.events import Event, Kind
from fxshard.schedule.schedule import Schedule
from tests.inspect.schedules import drawn


def position(schedule: Schedule, kind: Kind, bucket: str) -> int:
    return next(i for i, event in schedule.of(kind) if event.bucket == bucket)


def with_events(schedule: Schedule, events: list[Event]) -> Schedule:
    return replace(schedule, events=tuple(events))


def test_no_difference() -> None:
    found = diff(drawn(), drawn())
    assert not found and found.first is None
    assert "the same" in str(found) and "unchanged" in str(found)


def test_a_removed_event_and_an_added_one() -> None:
    a = drawn(layers=4)
    at = position(a, Kind.RESHARD, "layers.2")
    b = with_events(a, [event for i, event in enumerate(a.events) if i != at])
    gone = diff(a, b)
    assert [(change.was, change.before) for change in gone.removed] == [(at, a.events[at])]
    assert not gone.added and not gone.moved and not gone.changed
    back = diff(b, a)
    assert [change.now for change in back.added] == [at] and not back.removed
    assert f"first difference: #{at} forward reshard layers.2" in str(back)


def test_one_event_that_moves_is_one_move() -> None:
    a = drawn(layers=6)
    at = position(a, Kind.UNSHARD, "layers.4")
    events = list(a.events)
    events.insert(at - 5, events.pop(at))
    found = diff(a, with_events(a, events))
    assert [(change.was, change.now) for change in found.moved] == [(at, at - 5)]
    assert not found.added and not found.removed


def test_a_move_within_a_stretch_of_compute_is_seen() -> None:
    a = drawn(layers=3)
    at = position(a, Kind.UNSHARD, "layers.1")
    work = a.events[at + 1]
    assert work.kind is Kind.COMPUTE
    halves = [replace(work, flops=work.flops // 2, traffic=work.traffic // 2)] * 2
    b = with_events(a, [*a.events[:at], halves[0], a.events[at], halves[1], *a.events[at + 2 :]])
    assert [change.was for change in diff(a, b).moved] == [at]


def test_other_bytes_and_dtype_are_a_change() -> None:
    a = drawn()
    at = position(a, Kind.REDUCE, "layers.1")
    other = replace(a.events[at], bytes=a.events[at].bytes // 2, dtype=torch.bfloat16)
    found = diff(a, with_events(a, [*a.events[:at], other, *a.events[at + 1 :]]))
    assert [change.was for change in found.changed] == [at]
    assert "1.8 MiB → 896.0 KiB, float32 → bfloat16" in str(found)


def test_report_says_what_it_costs() -> None:
    text = str(diff(drawn(layers=12), drawn(layers=12, ahead=2, budget=2**30)))
    assert "peak           " in text and "+896.0 KiB" in text
    assert "budget         none → 1.00 GiB" in text
    assert "communication  " in text and "unchanged" in text
    assert "more" in text and len(text.splitlines()) < 30


def test_other_ranks_and_layers() -> None:
    found = diff(drawn(layers=2), drawn(layers=4, ranks=16))
    assert "ranks          8 → 16" in str(found)
    added = [change.after.bucket for change in found.added if change.after is not None]
    assert set(added) == {"layers.2", "layers.3"}


def test_the_fewest_events_move() -> None:
    assert _longest_increasing([0, 5, 1, 2, 3]) == {0, 2, 3, 4}
    assert _longest_increasing([]) == set()
