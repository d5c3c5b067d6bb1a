"""The Chrome trace: what Perfetto and chrome://tracing need to open it."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fxshard.schedule.events import Kind
from fxshard.schedule.table import render
from fxshard.schedule.trace import title, to_chrome_trace
from tests.inspect.schedules import drawn

SCHEDULE = drawn(layers=12)
SIMULATION = SCHEDULE.simulate("h200")


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    return json.loads(to_chrome_trace(SCHEDULE, SIMULATION))["traceEvents"]


def of(events: list[dict[str, Any]], ph: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == ph]


@pytest.mark.shows("P7")
def test_every_event_is_complete(events: list[dict[str, Any]]) -> None:
    required = {"X": {"ts", "dur", "tid", "name", "cat", "args"}, "M": {"name", "args"}, "C": {"ts", "name", "args"},
                "s": {"ts", "tid", "id", "name", "cat"}, "f": {"ts", "tid", "id", "bp", "name", "cat"}}  # fmt: skip
    for event in events:
        assert required[event["ph"]] | {"pid"} <= event.keys()
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0


@pytest.mark.shows("P7")
def test_one_named_track_per_stream_and_a_slice_per_span(events: list[dict[str, Any]]) -> None:
    tracks = {e["tid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "thread_name"}
    assert tracks == {0: "compute", 1: "gather", 2: "reduce"}
    slices = of(events, "X")
    assert [tracks[e["tid"]] for e in slices] == [span.stream for span in SIMULATION.spans]
    assert sum(e["dur"] for e in slices) == pytest.approx(
        1e6 * sum(s.stop - s.start for s in SIMULATION.spans), abs=0.25 * len(slices)
    )


def test_slices_of_a_track_do_not_overlap(events: list[dict[str, Any]]) -> None:
    by_track = defaultdict(list)
    for e in of(events, "X"):
        by_track[e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for slices in by_track.values():
        for (_, stop), (start, _) in pairwise(sorted(slices)):
            assert stop <= start


def test_slices_say_what_and_why(events: list[dict[str, Any]]) -> None:
    gather = next(e for e in of(events, "X") if e["name"] == "unshard layers.3")
    assert gather["args"]["why"] == "by hand"
    assert gather["args"]["dtype"] == "bfloat16"
    assert {"bucket", "bytes", "group", "slot"} <= gather["args"].keys()


@pytest.mark.shows("P7")
def test_times_are_whole_nanoseconds(events: list[dict[str, Any]]) -> None:
    """Perfetto drops a slice that overlaps the one before by a nanosecond, however small the error of a float."""
    for event in events:
        for key in {"ts", "dur"} & event.keys():
            assert (event[key] * 1000).is_integer()


@pytest.mark.shows("P7")
def test_arrows_come_in_pairs_between_tracks(events: list[dict[str, Any]]) -> None:
    assert all(isinstance(e["id"], int) for e in [*of(events, "s"), *of(events, "f")])  # Perfetto ignores others
    assert len(of(events, "s")) == len({e["id"] for e in of(events, "s")})
    starts = {e["id"]: e for e in of(events, "s")}
    ends = {e["id"]: e for e in of(events, "f")}
    assert starts and starts.keys() == ends.keys()
    assert all(starts[key]["tid"] != ends[key]["tid"] for key in starts)


def test_memory_is_a_counter(events: list[dict[str, Any]]) -> None:
    assert max(e["args"]["bytes"] for e in of(events, "C")) == SIMULATION.peak_bytes


def test_an_exchange_is_named_after_its_buckets() -> None:
    schedule = drawn(layers=6)
    _, gather = next(schedule.of(Kind.UNSHARD))
    names = {bucket.name: bucket.index for bucket in schedule.buckets}
    exchange = replace(gather, kind=Kind.EXCHANGE, bucket="", bucket_index=-1)
    few, many = (tuple(names[f"layers.{i}"] for i in range(count)) for count in (2, 6))
    assert title(schedule, replace(exchange, reads=few)) == "exchange layers.0, layers.1"
    assert title(schedule, replace(exchange, reads=many)) == "exchange layers.0 … layers.5"
    assert "layers.0 … layers.5" in render(replace(schedule, events=(replace(exchange, reads=many),)))
