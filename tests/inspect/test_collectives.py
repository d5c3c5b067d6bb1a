"""Collectives of the model's own in what a person looks at: durations, the table, the page, the trace, files."""

from __future__ import annotations

import json

import pytest

from fxshard.planner.collectives import BETWEEN, INSIDE, all_reduce_seconds, all_to_all_seconds
from fxshard.planner.hardware import hardware
from fxshard.planner.model_groups import ModelGroup
from fxshard.schedule.events import Kind
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.simulate import event_seconds, simulate
from tests.inspect.mutations.collectives import EP, TP, communicating

H200 = hardware("h200")


@pytest.mark.shows("T5")
def test_durations_follow_from_bytes_group_and_links() -> None:
    schedule = communicating()
    seconds = event_seconds(schedule, H200)
    (inside, _), (outside, _) = schedule.of(Kind.COLLECTIVE)
    assert seconds[inside] == all_reduce_seconds(4096, 8, H200), "eight neighbours share a node"
    assert seconds[outside] == all_reduce_seconds(4096, 4, H200, stride=8) > seconds[inside], "one rank on each of four"
    assert (TP.link(H200), EP.link(H200)) == (INSIDE, BETWEEN)
    assert ModelGroup("ep", 4, 8).seconds("all_to_all_single", 10**6, H200) == all_to_all_seconds(
        10**6, 4, H200, stride=8
    )


@pytest.mark.shows("T5")
def test_compute_goes_on_while_they_run_and_stops_where_they_are_awaited() -> None:
    """Layer 0 |1-11|, its sum |11-26|; layer 1 |11-21|, its sum |21-26| in another group; layer 2 from 26 on."""
    schedule = communicating()
    by_kind = {Kind.COMPUTE: 10.0, Kind.UNSHARD: 1.0}
    durations = {i: by_kind.get(event.kind, 0.0) for i, event in enumerate(schedule.events)}
    (first, _), (second, _) = schedule.of(Kind.COLLECTIVE)
    durations |= {first: 15.0, second: 5.0}
    run = simulate(schedule, "h200", durations=durations, shared_link=False)
    assert (run.spans[first].start, run.spans[first].stop) == (11, 26)
    assert (run.spans[second].start, run.spans[second].stop) == (21, 26)
    assert run.step_seconds == 36 and run.exposed_seconds == 6
    assert run.spans[first].stream == "tp×8" and run.spans[second].stream == "ep×4"


@pytest.mark.shows("T5")
def test_the_table_the_page_the_trace_and_files_show_them() -> None:
    schedule = communicating()
    text = str(schedule)
    assert text.startswith("ZeRO-3 on 2 ranks, the model itself in tp×8, ep×4 ·")
    assert "collective" in text and "all_reduce in tp×8" in text and "all_reduce in ep×4" in text
    page = schedule.to_html()
    assert "tp×8" in json.loads(page.split('id="data">')[1].split("</script>")[0])["streams"]
    trace = json.loads(schedule.to_chrome_trace())
    assert "all_reduce in tp×8" in {event["name"] for event in trace["traceEvents"]}
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.shows("T5", "P5")
def test_another_order_has_another_digest() -> None:
    """So ranks that would start them in different orders refuse before the first one."""
    schedule = communicating()
    lines = schedule.communication()
    (first, a), (second, b) = schedule.of(Kind.COLLECTIVE)
    events = list(schedule.events)
    events[first], events[second] = b, a
    other = Schedule(tuple(events), schedule.buckets, *(getattr(schedule, n) for n in REST))
    assert sorted(other.communication()) == sorted(lines) and other.digest != schedule.digest


REST = ("arena_bytes", "resident_bytes", "ranks", "zero", "budget", "graphs", "model_groups")
