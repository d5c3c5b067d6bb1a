"""``fill_arena``: where the network is slow, gathers start as early as there is room."""

from dataclasses import replace

import pytest
from torch import fx

from fxshard.passes.context import PassContext
from fxshard.passes.fill_arena import MORE, fill_arena
from fxshard.passes.plan_memory import lifetimes, plan_memory
from fxshard.plan.hardware import PRESETS, Hardware
from fxshard.plan.memory import MemoryPlan
from fxshard.schedule.events import Kind, Phase, events
from tests.passes.graphs import context
from tests.passes.test_keep_resident import BUCKETS, LAYERS, step

SLOW = replace(PRESETS["h200"], intra_bandwidth=1e3)
FAST = replace(PRESETS["h200"], intra_bandwidth=1e18, intra_latency=0.0)
SIZE = BUCKETS[0].gathered_bytes

Step = dict[Phase, fx.GraphModule]


def filled(machine: Hardware, budget: int | None = None) -> tuple[Step, PassContext, MemoryPlan, MemoryPlan]:
    frame = replace(context(*BUCKETS), hardware=machine, arena_budget=budget)
    modules = step(frame)
    before = plan_memory(modules, frame)
    return modules, frame, before, fill_arena(modules, frame, before)


def gathers(modules: Step, phase: Phase) -> list[int]:
    return [event.bucket_index for _, event in events(modules[phase].graph) if event.kind is Kind.UNSHARD]


def at_the_start(modules: Step, phase: Phase) -> int:
    """Gathers before the first wait."""
    kinds = [event.kind for _, event in events(modules[phase].graph)]
    return kinds[: kinds.index(Kind.WAIT)].count(Kind.UNSHARD)


def test_late_gathers_move_to_the_start_and_keep_their_order() -> None:
    modules, _, _, _ = filled(SLOW)
    untouched = step(replace(context(*BUCKETS), hardware=SLOW))
    assert at_the_start(modules, Phase.FORWARD) > at_the_start(untouched, Phase.FORWARD) == 1
    for phase in modules:
        assert gathers(modules, phase) == gathers(untouched, phase)
        modules[phase].graph.lint()


def test_what_is_hidden_stays_where_it_is() -> None:
    modules, _, before, after = filled(FAST)
    assert after.bytes == before.bytes
    assert at_the_start(modules, Phase.FORWARD) == 1


@pytest.mark.parametrize("extra", [None, 0, 1, 3])
def test_room_is_that_of_the_arena_and_a_little_more(extra: int | None) -> None:
    frame = context(*BUCKETS)
    base = plan_memory(step(frame), frame).bytes
    _, _, before, after = filled(SLOW, None if extra is None else base + extra * SIZE)
    assert before.bytes == base
    assert after.bytes <= base + (MORE if extra is None else extra) * SIZE


@pytest.mark.parametrize("budget", [None, 10**9])
def test_nothing_lies_where_something_else_does(budget: int | None) -> None:
    modules, frame, _, plan = filled(SLOW, budget)
    timeline = [event for module in modules.values() for _, event in events(module.graph)]
    buffers = lifetimes(timeline, frame)
    assert len(buffers) == 3 * LAYERS
    for i, one in enumerate(buffers):
        for other in buffers[:i]:
            a, b = plan.slots[one.key], plan.slots[other.key]
            assert not one.overlaps(other) or a.end <= b.offset or b.end <= a.offset
        assert plan.slots[one.key].end <= plan.bytes


def test_backward_starts_early_only_before_its_first_reduction() -> None:
    modules, _, _, _ = filled(SLOW, 10**9)
    lines = [(event.kind, event.why) for _, event in events(modules[Phase.BACKWARD].graph)]
    first = next(i for i, (kind, _) in enumerate(lines) if kind is Kind.REDUCE)
    moved = [i for i, (kind, why) in enumerate(lines) if kind is Kind.UNSHARD and why.startswith("late")]
    assert moved and max(moved) < first
