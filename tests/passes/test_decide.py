"""``decide`` is a function of data, and ``apply_decisions`` does what it says."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxshard
from fxshard.passes.apply_decisions import apply_decisions
from fxshard.passes.context import PassContext
from fxshard.passes.decide import Decisions, decide, least_arena, plain_orders
from fxshard.passes.options import Options
from fxshard.passes.timeline import Timeline
from fxshard.planner.hardware import PRESETS
from fxshard.planner.memory import MemoryPlan
from fxshard.schedule.events import Kind, Phase, events
from tests.passes.graphs import context
from tests.passes.test_keep_resident import BUCKETS, LAYERS, inserted

TIMELINE = Timeline.of(inserted(context(*BUCKETS)))
SIZE = BUCKETS[0].gathered_bytes


def frame(bandwidth: float = 1e9, **debug: object) -> PassContext:
    options = Options(lowering="eager", debug=fxshard.Debug(**debug))  # type: ignore[arg-type]
    machine = replace(PRESETS["h200"], intra_bandwidth=bandwidth)
    return PassContext(BUCKETS, options, Phase.FORWARD, "test", ranks=2, hardware=machine)


@settings(max_examples=40, deadline=None)
@given(
    bandwidth=st.sampled_from([1e3, 1e9, 1e11, 1e18]),
    budget=st.none() | st.integers(3, 20),
    prefetch=st.none() | st.integers(0, 3),
    keep_resident=st.booleans(),
)
def test_the_same_input_gives_the_same_decisions_and_stays_as_it_was(
    bandwidth: float, budget: int | None, prefetch: int | None, keep_resident: bool
) -> None:
    given = frame(bandwidth, prefetch=prefetch, keep_resident=keep_resident)
    limit = None if budget is None else max(budget * SIZE, least_arena(plain_orders(TIMELINE, given)))
    before = copy.deepcopy(TIMELINE)
    made = [decide(plain_orders(copy.deepcopy(before), given), limit) for _ in range(2)]
    assert made[0] == made[1] and before == TIMELINE
    assert limit is None or made[0].memory.bytes <= limit


@pytest.mark.parametrize("debug", [{}, {"prefetch": 0}, {"prefetch": 2}, {"keep_resident": False}])
@pytest.mark.parametrize("bandwidth", [1e3, 1e18])
def test_graphs_become_what_was_decided(bandwidth: float, debug: dict[str, object]) -> None:
    given = frame(bandwidth, **debug)
    modules = inserted(given)
    decisions = decide(plain_orders(Timeline.of(modules), given))
    computed = {
        phase: [n.name for n in module.graph.nodes if not n.meta.get("fxshard")] for phase, module in modules.items()
    }
    apply_decisions(modules, decisions)
    assert [event for module in modules.values() for _, event in events(module.graph)] == [*decisions.timeline.events]
    assert Timeline.of(modules).events == decisions.timeline.events
    for phase, module in modules.items():
        assert [n.name for n in module.graph.nodes if not n.meta.get("fxshard")] == computed[phase]


def test_a_gather_keeps_the_place_of_a_release_that_is_removed() -> None:
    """It was not decided to start it earlier, so it does not, though nothing is left there to anchor it."""
    modules = inserted(frame())
    forward, backward = Timeline.of(modules).phases
    release = forward.others[forward.places(Kind.RESHARD)[LAYERS - 2]]
    *earlier, last = forward.gathers
    forward = replace(forward, gathers=(*earlier, replace(last, after=release.node)))
    timeline = Timeline((forward, backward)).keeping({LAYERS - 2})
    [before] = [node for node, event in events(modules[Phase.FORWARD].graph) if event == release.event]
    computed = before.prev
    apply_decisions(modules, Decisions(timeline, frozenset({LAYERS - 2}), MemoryPlan({}, 0)))
    [gather] = [node for node, event in events(modules[Phase.FORWARD].graph) if event == last.event]
    assert gather.prev is computed


def test_a_gather_starts_before_what_computes_with_the_result_of_an_event() -> None:
    """Between an event and its first reader: further down it would end a stretch of compute, and cut a fusion."""
    modules = inserted(frame())
    forward, backward = Timeline.of(modules).phases
    wait = forward.others[forward.places(Kind.WAIT)[LAYERS - 2]]
    *earlier, last = forward.gathers
    forward = replace(forward, gathers=(*earlier, replace(last, after=wait.node)))
    graph = modules[Phase.FORWARD].graph
    [event] = [node for node, event in events(graph) if event == wait.event]
    with graph.inserting_after(event):
        reader = graph.call_function(torch.ops.aten.neg.default, (event,))
    apply_decisions(modules, Decisions(Timeline((forward, backward)), frozenset(), MemoryPlan({}, 0)))
    [gather] = [node for node, event in events(graph) if event == last.event]
    assert (gather.prev, gather.next) == (event, reader)
