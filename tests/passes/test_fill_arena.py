"""``fill_arena``: where the network is slow, gathers start as early as there is room."""

from dataclasses import replace

import pytest

from fxshard.passes.fill_arena import fill_arena
from fxshard.passes.order_prefetch import late_gathers, latest_starts
from fxshard.passes.plan_memory import lifetimes, plan_memory
from fxshard.passes.timeline import Timeline
from fxshard.planner.hardware import PRESETS, Hardware
from fxshard.planner.memory import MemoryPlan
from fxshard.planner.tuning import MORE
from fxshard.schedule.events import Kind, Phase
from tests.passes.graphs import context
from tests.passes.test_keep_resident import BUCKETS, LAYERS, step

SLOW = replace(PRESETS["h200"], intra_bandwidth=1e3)
FAST = replace(PRESETS["h200"], intra_bandwidth=1e18, intra_latency=0.0)
SIZE = BUCKETS[0].gathered_bytes


def filled(machine: Hardware, budget: int | None = None) -> tuple[Timeline, MemoryPlan, MemoryPlan]:
    frame = replace(context(*BUCKETS), hardware=machine)
    timeline = step(frame)
    late = {node for part in timeline.phases for node in late_gathers(part, latest_starts(part, frame))}
    before = plan_memory(timeline, BUCKETS)
    moved, after = fill_arena(timeline, BUCKETS, before, late, arena_budget=budget)
    return moved, before, after


def gathers(timeline: Timeline, phase: Phase) -> list[int]:
    return [e.bucket_index for e in timeline.events if e.kind is Kind.UNSHARD and e.phase is phase]


def at_the_start(timeline: Timeline) -> int:
    """Gathers of forward before the first wait."""
    kinds = [event.kind for event in timeline.events]
    return kinds[: kinds.index(Kind.WAIT)].count(Kind.UNSHARD)


def test_late_gathers_move_to_the_start_and_keep_their_order() -> None:
    moved, _, _ = filled(SLOW)
    untouched = step(context(*BUCKETS))
    assert at_the_start(moved) > at_the_start(untouched) == 1
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert gathers(moved, phase) == gathers(untouched, phase)


def test_what_is_hidden_stays_where_it_is() -> None:
    moved, before, after = filled(FAST)
    assert after == before
    assert moved == step(context(*BUCKETS))


@pytest.mark.parametrize("extra", [None, 0, 1, 3])
def test_room_is_that_of_the_arena_and_a_little_more(extra: int | None) -> None:
    base = plan_memory(step(context(*BUCKETS)), BUCKETS).bytes
    _, before, after = filled(SLOW, None if extra is None else base + extra * SIZE)
    assert before.bytes == base
    assert after.bytes <= base + (MORE if extra is None else extra) * SIZE


@pytest.mark.parametrize("budget", [None, 10**9])
def test_nothing_lies_where_something_else_does(budget: int | None) -> None:
    moved, _, plan = filled(SLOW, budget)
    buffers = lifetimes(moved.events, BUCKETS)
    assert len(buffers) == 3 * LAYERS
    for i, one in enumerate(buffers):
        for other in buffers[:i]:
            a, b = plan.slots[one.key], plan.slots[other.key]
            assert not one.overlaps(other) or a.end <= b.offset or b.end <= a.offset
        assert plan.slots[one.key].end <= plan.bytes


def test_backward_starts_early_only_before_its_first_reduction() -> None:
    timeline, _, _ = filled(SLOW, 10**9)
    lines = [(event.kind, event.why) for event in timeline.events if event.phase is Phase.BACKWARD]
    first = next(i for i, (kind, _) in enumerate(lines) if kind is Kind.REDUCE)
    moved = [i for i, (kind, why) in enumerate(lines) if kind is Kind.UNSHARD and why.startswith("late")]
    assert moved and max(moved) < first
