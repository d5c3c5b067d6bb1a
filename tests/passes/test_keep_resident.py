"""``keep_resident``: what fits is not gathered twice."""

from dataclasses import replace

from torch import fx

from fxshard.passes.context import PassContext
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.passes.insert_reshard import insert_reshard
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.passes.keep_resident import Order, keep_resident
from fxshard.passes.order_prefetch import order_prefetch
from fxshard.passes.plan_memory import plan_memory, with_slots
from fxshard.passes.timeline import Timeline
from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, aten, bucket, chain, context

SQUARE = (64, 64)
LAYERS = 6
BUCKETS = tuple(bucket(i, SQUARE) for i in range(LAYERS))


def backward() -> fx.GraphModule:
    draft = Draft()
    weights = [draft.input(f"w{i}", *SQUARE, param=ParamRef(i, 0)) for i in range(LAYERS)]
    saved, dy = draft.input("saved", *SQUARE), draft.input("dy", *SQUARE)
    grads: list[fx.Node] = []
    for weight in reversed(weights):
        grads.append(draft.call(aten.mm.default, saved, dy))
        dy = draft.call(aten.mm.default, dy, weight)
    return draft.output(*reversed(grads), dy, grads=[*[ParamRef(i, 0) for i in range(LAYERS)], None])


def inserted(frame: PassContext) -> dict[Phase, fx.GraphModule]:
    modules = {Phase.FORWARD: chain(LAYERS, SQUARE, saves=True), Phase.BACKWARD: backward()}
    for phase, module in modules.items():
        here = replace(frame, phase=phase)
        insert_reshard(insert_unshard(module, here), here)
        if phase is Phase.BACKWARD:
            insert_reduce_scatter(module, here)
    return modules


def step(frame: PassContext) -> Timeline:
    """One gather ahead."""
    return Timeline.of(inserted(frame)).each(lambda part: order_prefetch(part, 1))


def gathers(timeline: Timeline) -> int:
    return sum(event.kind is Kind.UNSHARD for event in timeline.events)


def test_what_is_kept_without_a_budget_costs_no_memory() -> None:
    frame = context(*BUCKETS)
    timeline, kept = keep_resident(Order(step(frame), frame))
    assert LAYERS - 1 in kept  # what forward uses last, backward uses first
    assert plan_memory(timeline, BUCKETS).bytes <= plan_memory(step(frame), BUCKETS).bytes
    assert gathers(timeline) == 2 * LAYERS - len(kept)


def test_a_budget_keeps_as_much_as_it_allows() -> None:
    frame = context(*BUCKETS)
    base = plan_memory(step(frame), BUCKETS).bytes
    counts = []
    for extra in (0, 2, 100):
        budget = base + extra * BUCKETS[0].gathered_bytes
        timeline, kept = keep_resident(Order(step(frame), frame), budget)
        counts.append(len(kept))
        assert plan_memory(timeline, BUCKETS).bytes <= budget
    assert counts[0] < counts[1] < counts[2] == LAYERS


def test_it_can_be_turned_off() -> None:
    frame = context(*BUCKETS, keep_resident=False)
    assert keep_resident(Order(step(frame), frame)) == (step(frame), frozenset())


def test_a_kept_bucket_is_one_buffer_from_forward_to_backward() -> None:
    frame = context(*BUCKETS)
    timeline, kept = keep_resident(Order(step(frame), frame))
    placed = with_slots(timeline, BUCKETS, plan_memory(timeline, BUCKETS))
    slots = [
        event.slot
        for event in placed.events
        if event.bucket_index == max(kept) and event.kind in (Kind.UNSHARD, Kind.WAIT)
    ]
    assert len(slots) == 3 and len(set(slots)) == 1 and slots[0] is not None


def test_a_kept_bucket_says_so() -> None:
    frame = context(*BUCKETS)
    timeline, kept = keep_resident(Order(step(frame), frame))
    noted = {event.bucket_index for event in timeline.events if event.why.startswith("kept since forward, first use")}
    assert noted == kept
