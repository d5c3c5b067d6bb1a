"""``order_prefetch``: when gathers start, by depth and by deadline."""

from dataclasses import replace

import pytest

from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.passes.order_prefetch import latest_starts, order_prefetch
from fxshard.passes.timeline import PhaseTimeline
from fxshard.planner.hardware import Hardware, hardware
from fxshard.schedule.events import Phase
from tests.passes.graphs import bucket, chain, context

SQUARE = (64, 64)
LAYERS = 5
DEPTH = 2
BUCKETS = tuple(bucket(i, SQUARE) for i in range(LAYERS))


def timeline() -> PhaseTimeline:
    frame = context(*BUCKETS)
    return PhaseTimeline.of(Phase.FORWARD, insert_reshard(insert_unshard(chain(LAYERS, SQUARE), frame), frame).graph)


def by_deadline(machine: Hardware) -> PhaseTimeline:
    part = timeline()
    return order_prefetch(part, DEPTH, latest_starts(part, replace(context(*BUCKETS), hardware=machine)))


def lines_of(part: PhaseTimeline) -> list[str]:
    return [f"{entry.event.kind} {entry.event.bucket_index}" for entry in part.entries]


def alive(lines: list[str]) -> int:
    most = now = 0
    for line in lines:
        now += line.startswith("unshard") - line.startswith("reshard")
        most = max(most, now)
    return most


def test_depth_zero_gathers_where_needed() -> None:
    lines = lines_of(order_prefetch(timeline(), 0))
    for i in range(LAYERS):
        assert lines.index(f"wait {i}") == lines.index(f"unshard {i}") + 1
    assert alive(lines) == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_depth_needs_one_place_more_and_keeps_the_order(depth: int) -> None:
    lines = lines_of(order_prefetch(timeline(), depth))
    assert [line for line in lines if line.startswith("unshard")] == [f"unshard {i}" for i in range(LAYERS)]
    assert alive(lines) == depth + 1
    assert all(lines.index(f"unshard {i}") < lines.index(f"wait {i - depth + 1}") for i in range(depth, LAYERS))


def test_deadlines_start_late_where_the_network_is_fast_and_early_where_it_is_slow() -> None:
    machine = hardware("h200")
    fast = replace(machine, intra_bandwidth=1e18, intra_latency=0.0)
    slow = replace(machine, intra_bandwidth=1e6)
    lines = {name: lines_of(by_deadline(hw)) for name, hw in (("fast", fast), ("slow", slow))}
    assert alive(lines["fast"]) <= 2 < alive(lines["slow"]) == DEPTH + 1
    for listed in lines.values():
        assert [line for line in listed if line.startswith("unshard")] == [f"unshard {i}" for i in range(LAYERS)]
        for i in range(LAYERS):
            assert listed.index(f"unshard {i}") < listed.index(f"wait {i}") < listed.index(f"reshard {i}")


def test_every_gather_says_why_it_stands_where_it_stands() -> None:
    reasons = {gather.event.why for gather in by_deadline(hardware("h200")).gathers}
    assert reasons <= {"at the start", "latest start that hides it", f"as early as {DEPTH} ahead allows"}


def test_what_is_not_moved_is_as_it_was() -> None:
    before = timeline()
    after = order_prefetch(before, 1)
    assert after.others == before.others and before == timeline()
