"""Rules for the fields of each event, which follow from its kind, its bucket and the bucket's domain."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from fxshard.kernels.mxfp8 import E4M3
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.gather_modes import Copies, Gather
from fxshard.planner.memory import GRANULE
from fxshard.schedule.accumulation import PASSES
from fxshard.schedule.dependencies import dependencies
from fxshard.schedule.events import OF_HOST, OF_MODEL, STREAM, Event, Kind, Phase
from fxshard.schedule.graph_summary import GraphSummary
from fxshard.schedule.scales import scales_event
from fxshard.schedule.step import COMPUTES_NOTHING, GIVEN_BACK_BY, OF_NO_BUCKET, Step
from fxshard.schedule.updates import update

PASSING = (Phase.FORWARD, Phase.BACKWARD, Phase.EVAL)
PHASES: dict[Kind, tuple[Phase, ...]] = {
    Kind.COMPUTE: (*PASSING, Phase.OPTIMIZER),
    Kind.UNSHARD: (*PASSING, Phase.OPTIMIZER),
    Kind.WAIT: PASSING,
    Kind.RESHARD: PASSING,
    **dict.fromkeys((Kind.GRAD, Kind.REDUCE, Kind.ALL_REDUCE, Kind.ACCUMULATE, Kind.FINISH), (Phase.BACKWARD,)),
    **dict.fromkeys((Kind.UPDATE, Kind.EXCHANGE), (Phase.OPTIMIZER,)),
    **dict.fromkeys((Kind.SCALES, *OF_MODEL), PASSING),
    **dict.fromkeys((Kind.OFFLOAD, Kind.RELEASE), (Phase.FORWARD,)),
    **dict.fromkeys((Kind.RELOAD, Kind.RESTORE), (Phase.BACKWARD,)),
}
"""Where an event of a kind may stand."""

ORDER = {Phase.FORWARD: 0, Phase.BACKWARD: 1, Phase.OPTIMIZER: 2}
GRAPHS: tuple[list[Phase], ...] = ([], [Phase.FORWARD, Phase.BACKWARD], [Phase.FORWARD], [Phase.BACKWARD], [Phase.EVAL])
"""Graphs that a schedule may be recorded from; a single pass works on one of them."""
ON_GRADS = (Kind.GRAD, Kind.REDUCE, Kind.ALL_REDUCE, Kind.ACCUMULATE, Kind.FINISH)


def phases_are_in_order(step: Step) -> None:
    """Forward, then backward, then the optimizer, or an evaluation alone; kinds stand in their phases."""
    rule = phases_are_in_order
    before = step.schedule.events[0].phase if step.schedule.events else Phase.EVAL
    for i, event in enumerate(step.schedule.events):
        if event.phase not in PHASES[event.kind]:
            step.broken(rule, i, f"stands in {event.phase}")
        if event.phase is not before and ORDER.get(event.phase, -1) <= ORDER.get(before, 3):
            step.broken(rule, i, f"comes after {before}")
        before = event.phase


def events_match_their_buckets(step: Step) -> None:
    """Name, parameters, bytes, dtype, group and stream of an event are those that its bucket has for its kind."""
    rule = events_match_their_buckets
    unnamed: str | None = None  # the group of buckets that do not say which theirs is: the same for all
    for i, event in enumerate(step.schedule.events):
        if event.kind is Kind.EXCHANGE or (event.phase is Phase.OPTIMIZER and event.kind is Kind.COMPUTE):
            continue  # optimizer_follows_from_the_buckets
        if event.kind in OF_MODEL or event.kind in OF_HOST:
            continue  # collectives_are_those_of_the_graphs, copies_are_those_of_the_graphs
        if event.kind is Kind.COMPUTE:
            wanted = OF_NO_BUCKET | {"bytes": 0, "group": "", "stream": "compute"}
        elif event.kind is Kind.SCALES:
            wanted = _scales(step, event)
        else:
            bucket = step.bucket(event.bucket_index)
            wanted = _runtime(event, bucket)
            if not bucket.domain.device and wanted["group"]:
                unnamed = event.group if unnamed is None else unnamed
                wanted["group"] = unnamed
        step.has_right(rule, i, wanted)
        for what in _amiss(step, event):
            step.broken(rule, i, what)


def _scales(step: Step, event: Event) -> dict[str, Any]:
    """All but the reason and what it waits for."""
    planned = scales_event(step.schedule.buckets, event.phase, event.group)
    return {} if planned is None else {k: v for k, v in vars(planned).items() if k not in ("why", "waits_for")}


def _runtime(event: Event, bucket: BucketPlan) -> dict[str, Any]:
    """The fields of an event of a bucket that follow from the bucket."""
    kind, over_replicas = event.kind, event.kind is Kind.ALL_REDUCE
    on_grads = kind in ON_GRADS
    size = bucket.grad_bytes if on_grads else bucket.gathered_bytes
    wanted: dict[str, Any] = {
        "bucket": bucket.name,
        "params": bucket.params,
        "bytes": size // bucket.layout.ranks if over_replicas else size,
        "dtype": bucket.reduce_dtype if on_grads else bucket.param_dtype,
        "group": bucket.group("any", replicas=over_replicas),
        "stream": STREAM.get(kind, "compute"),
        **COMPUTES_NOTHING,
        "reads": (),
        "writes": (),
    }
    if kind is Kind.ACCUMULATE:
        wanted |= {"group": "", "traffic": PASSES * size}
    if kind is Kind.UPDATE:
        planned = update(event, bucket, event.flops)
        wanted |= {name: getattr(planned, name) for name in ("bytes", "dtype", "traffic", "flops", "peak")}
    if kind in (Kind.UNSHARD, Kind.WAIT) and bucket.gather is Gather.DIRECT:
        wanted |= {"bytes": event.copies.number * bucket.copy_bytes(bucket.layout.numel), "dtype": E4M3}
    if kind not in (Kind.UNSHARD, Kind.WAIT) or not bucket.rests_quantized:
        wanted["copies"] = Copies.NONE
    if kind not in (*GIVEN_BACK_BY, Kind.WAIT):
        wanted["slot"] = None
    return wanted


def _amiss(step: Step, event: Event) -> Iterator[str]:
    """What is wrong with an event beyond fields that have one right value."""
    if min(event.flops, event.traffic, event.held) < 0:
        yield "computes, moves or holds less than nothing"
    if event.peak < event.held:
        yield f"holds {event.held} bytes of activations at its end, but at most {event.peak}"
    if event.kind is Kind.SCALES:
        if not event.reads:
            yield "scales weights, but none of them rests in float8"
        return
    if event.kind is Kind.COMPUTE:
        if event.nodes < 1:
            yield f"is a stretch of {event.nodes} nodes"
        for touched in (event.reads, event.writes):
            if _unsorted(touched):
                yield f"lists buckets {touched}, not each once and in order"
        for index in event.writes:
            if not step.bucket(index).trainable or event.phase is not Phase.BACKWARD:
                yield f"writes gradients of {step.bucket(index).name!r} in {event.phase}, where there are none"
        return
    bucket = step.bucket(event.bucket_index)
    if event.kind in (*ON_GRADS, Kind.UPDATE) and not bucket.trainable:
        yield "is about gradients of a bucket that is frozen"
    if event.kind in (Kind.UNSHARD, Kind.WAIT) and bucket.rests_quantized and not event.copies.number:
        yield "names none of the quantized copies"
    slot = event.slot if event.kind in GIVEN_BACK_BY else None
    if slot is not None and (slot.offset % GRANULE or slot.bytes != event.bytes):
        yield f"has {slot.bytes} bytes at {slot.offset} of the arena for its {event.bytes}"


def waits_are_where_their_gathers_are(step: Step) -> None:
    """A wait names the place in the arena that its gather fills, and the copies that a gather of its phase brings."""
    rule = waits_are_where_their_gathers_are
    for index, trail in step.trails.items():
        gathered = step.carried.get(index)
        first = False  # whether a gather of this step waits for its first wait
        for i, what in trail:
            event = step.event(i)
            if what == Kind.UNSHARD:
                gathered, first = i, True
            elif what == Kind.WAIT:
                slot = step.event(gathered).slot if gathered is not None else None
                if event.slot != slot:
                    step.broken(rule, i, f"reads from {event.slot}, but event {gathered} gathers to {slot}")
                if gathered is None:
                    if event.phase is not Phase.BACKWARD:
                        step.broken(rule, i, "waits for a bucket that nothing gathers")
                    continue
                if first and step.event(gathered).phase is not event.phase:
                    step.broken(rule, gathered, f"is first waited for in {event.phase}, by event {i}")
                ahead = gathered == step.carried.get(index) and event.phase is Phase.FORWARD
                brought = step.event(gathered).copies
                # A bucket in float8 that is kept for backward is gathered once, with all copies.
                kept = brought is Copies.BOTH and step.bucket(index).float8 is not None
                if (first or ahead) and not kept and event.copies is not brought:
                    step.broken(rule, i, f"wants {event.copies!r}, but event {gathered} brings another copy")
                first = False


def optimizer_follows_from_the_buckets(step: Step) -> None:
    """Updates, and exchanges with Muon's owners, are those that an optimizer of fxshard's makes for these buckets.

    With another optimizer there is one update per reduced bucket, nothing is exchanged and nothing gathered ahead.
    """
    rule, schedule = optimizer_follows_from_the_buckets, step.schedule
    reduced = {event.bucket_index: event for _, event in schedule.of(Kind.REDUCE)}
    gathered = any(True for _ in schedule.of(Kind.UNSHARD, phase=Phase.OPTIMIZER))
    found = [(i, event) for i, event in enumerate(schedule.events) if event.phase is Phase.OPTIMIZER]
    if not found and not reduced:
        return
    plain = Counter(_key(update(event, schedule.buckets[index])) for index, event in reduced.items())
    if not gathered and plain == Counter(_key(event) for _, event in found):
        return
    planned = Counter(map(_key, step.planned_updates))
    for i, event in found:
        if not planned[_key(event)]:
            step.broken(rule, i, "is not what the buckets and the reductions ask for")
        planned[_key(event)] -= 1
    missing = next(planned.elements(), None)
    if missing is not None:
        step.broken(rule, len(schedule) - 1, f"ends the step without {missing[0]} of {', '.join(missing[1])}")


def _key(event: Event) -> tuple[Any, ...]:
    """An event less its reason and what it waits for."""
    left_out = ("kind", "params", "why", "waits_for")
    return event.kind, event.params, *(value for name, value in vars(event).items() if name not in left_out)


def computes_are_those_of_the_graphs(step: Step) -> None:
    """Stretches of compute have all nodes of their graph, and use the buckets, in the shapes, that the graph does."""
    rule, schedule = computes_are_those_of_the_graphs, step.schedule
    stretches: dict[Phase, list[int]] = {}
    for i, event in schedule.of(Kind.COMPUTE):
        stretches.setdefault(event.phase, []).append(i)
    phases = [graph.phase for graph in schedule.graphs]
    used = {event.phase for event in schedule.events if event.phase in PASSING}
    if phases not in GRAPHS or not used <= {*phases}:
        step.fails(rule, f"events are of {', '.join(sorted(used))}, but graphs of {', '.join(phases) or 'nothing'}")
    for graph in schedule.graphs:
        phase = graph.phase
        _as_in_the_graph(step, graph, stretches.get(phase, []))
        for given in graph.inputs:
            slots = step.bucket(given.bucket).layout.slots if 0 <= given.bucket < len(schedule.buckets) else ()
            spec = slots[given.position].spec if 0 <= given.position < len(slots) else None
            if spec is None or spec.shape != given.shape:
                step.fails(rule, f"the graph of {phase} was traced with {given}, but the bucket has {spec}")
        if len({(given.bucket, given.position) for given in graph.inputs}) < len(graph.inputs):
            step.fails(rule, f"the graph of {phase} was traced with one parameter twice")


def _as_in_the_graph(step: Step, graph: GraphSummary, stretches: list[int]) -> None:
    """Each stretch reads and writes what its nodes do; all of them together are the graph."""
    rule = computes_are_those_of_the_graphs
    ends = list(accumulate(step.event(i).nodes for i in stretches))
    if (ends[-1] if ends else 0) != graph.nodes:
        step.fails(
            rule, f"stretches of {graph.phase} end at node {ends[-1:]}, its graph has {graph.nodes} that compute"
        )
    for field, uses in (("reads", graph.reads), ("writes", graph.writes)):
        found: dict[int, set[int]] = {i: set() for i in stretches}
        if _unsorted([use.bucket for use in uses]):
            step.fails(rule, f"the graph of {graph.phase} lists what it {field} out of order, or twice")
        for use in uses:
            if not use.nodes or _unsorted(use.nodes) or not 0 <= use.nodes[0] <= use.nodes[-1] < graph.nodes:
                step.fails(rule, f"nodes {use.nodes} of {graph.phase}, which {field} bucket {use.bucket}, cannot be")
            for node in use.nodes:
                found[stretches[bisect_right(ends, node)]].add(use.bucket)
        for i, buckets in found.items():
            if {*getattr(step.event(i), field)} != buckets:
                what = f"{field} buckets {getattr(step.event(i), field)}, its nodes in the graph {sorted(buckets)}"
                step.broken(rule, i, what)


def _unsorted(numbers: Sequence[int]) -> bool:
    """Whether numbers are not each there once and in order."""
    return any(a >= b for a, b in pairwise(numbers))


def waits_and_gradients_are_used(step: Step) -> None:
    """Compute reads what is waited for, in the phase that waits, and writes every gradient bucket that is taken."""
    rule = waits_and_gradients_are_used
    for trail in step.trails.values():
        waiting: int | None = None
        taken: int | None = None
        for i, what in [*trail, (-1, Kind.WAIT)]:
            if what == "read":
                waiting = None
            elif what in (Kind.WAIT, Kind.RESHARD) and waiting is not None:
                step.broken(rule, waiting, "waits for parameters that nothing reads")
            elif what == "write":
                taken = None
            elif what in (Kind.REDUCE, Kind.ACCUMULATE) and taken is not None:
                step.broken(rule, taken, "takes gradients that nothing writes")
            if what == Kind.WAIT:
                waiting = i
            elif what == Kind.GRAD:
                taken = i


def waits_for_follows_from_the_order(step: Step) -> None:
    """``waits_for`` is what the order of events, their buckets and their places make necessary, no less and no more."""
    for i, needs in enumerate(dependencies(step.schedule.events, step.schedule.buckets)):
        if needs != step.event(i).waits_for:
            what = f"waits for {step.event(i).waits_for}, but has to wait for {needs}"
            step.broken(waits_for_follows_from_the_order, i, what)
