"""Forward, backward, evaluation: when each gather starts.

Requires ``insert_unshard`` and ``insert_reshard``. Moves every ``unshard`` ahead of its ``wait``; their order never
changes, so all ranks agree on it. Two rules, both in terms of the runtime nodes that are there already, so that no
stretch of compute is cut further:

* a fixed depth: gather ``k`` starts once bucket ``k - depth`` is in use and what came before that one is released;
* deadlines: with the durations of the cost model, walking backwards, ``start(k) = min(deadline(k), start(k + 1)) -
  duration(k)`` is the latest start that still hides gather ``k``, hence the one that holds memory for the shortest
  time. No more than ``ahead`` gathers start early, which bounds the memory where communication cannot be hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from fxshard.passes.context import PassContext
from fxshard.plan.cost import node_flops, node_traffic
from fxshard.plan.transfers import gather_seconds, link, reduce_seconds, replicas_seconds
from fxshard.schedule.events import META, Kind, Phase, event_of, events
from fxshard.schedule.profile import Profile

PLAINLY_LEADING = 2
"""Gathers that start with forward whatever room there is; ``fill_arena`` finds places for others among them."""

MARGIN = 1.25
"""Estimates of durations are stretched by this: a gather that starts a little early costs little, a late one stalls."""


@dataclass(frozen=True)
class _Places:
    """Where the gathers of a graph stand and may stand: behind runtime nodes that are there already."""

    launches: dict[int, fx.Node]
    sequence: list[int]
    """Buckets in the order in which they are needed."""
    anchors: list[fx.Node | None]
    needed: dict[int, int]
    """{bucket: the last place before its wait}, as a position in ``anchors``, here and below"""
    released: dict[int, int]

    @classmethod
    def of(cls, graph: fx.Graph) -> _Places:
        nodes: dict[Kind, dict[int, fx.Node]] = {kind: {} for kind in Kind}
        for node, event in events(graph):
            nodes[event.kind][event.bucket_index] = node
        anchors = _anchors(graph)
        order = {anchor: i for i, anchor in enumerate(anchors)}
        waits = nodes[Kind.WAIT]
        sequence = sorted(nodes[Kind.UNSHARD], key=lambda index: order[waits[index]])
        needed = {index: order[waits[index]] - 1 for index in sequence}
        released = {index: order[node] for index, node in nodes[Kind.RESHARD].items()}
        return cls(nodes[Kind.UNSHARD], sequence, anchors, needed, released)

    def starts(self, graph: fx.Graph) -> dict[int, int]:
        """{bucket: the place at which its gather stands}"""
        found, place = {}, 0
        for _, event in events(graph):
            if event.kind is Kind.UNSHARD:
                found[event.bucket_index] = place
            else:
                place += 1
        return found


def order_prefetch(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    places = _Places.of(graph)
    sequence, needed = places.sequence, places.needed
    if not sequence:
        return module

    depth = context.ahead
    earliest = _by_depth(sequence, needed, places.released, depth)
    starts = earliest
    why = dict.fromkeys(sequence, f"{depth} ahead")
    if context.by_deadline and context.hardware is not None:
        latest = _by_deadline(graph, places, context)
        starts = {index: max(earliest[index], min(latest[index], needed[index])) for index in sequence}
        for index in sequence:
            hidden = latest[index] >= earliest[index]
            why[index] = "latest start that hides it" if hidden else f"as early as {depth} ahead allows"
        if context.phase is Phase.FORWARD:
            starts |= dict.fromkeys(sequence[: min(context.leading, PLAINLY_LEADING)], 0)
    _move(places.launches, sequence, starts, places.anchors, why)
    return module


def late_gathers(module: fx.GraphModule, context: PassContext) -> set[fx.Node]:
    """Gathers that start where durations say they are not done when they are needed."""
    places = _Places.of(module.graph)
    if not places.sequence:
        return set()
    latest, starts = _by_deadline(module.graph, places, context), places.starts(module.graph)
    return {places.launches[index] for index in places.sequence if latest[index] < starts[index]}


def _anchors(graph: fx.Graph) -> list[fx.Node | None]:
    """Where a gather may start: at the beginning (None), or behind any runtime node that is not itself a gather."""
    return [None, *[node for node, event in events(graph) if event.kind is not Kind.UNSHARD]]


def _by_depth(sequence: list[int], needed: dict[int, int], released: dict[int, int], depth: int) -> dict[int, int]:
    """The earliest start that ``depth`` allows: the bucket ``depth`` earlier is in use, those before are released."""
    starts: dict[int, int] = {}
    for k, index in enumerate(sequence):
        if k < depth:
            starts[index] = 0
        elif depth == 0:
            starts[index] = needed[index]
        else:
            in_use = needed[sequence[k - depth]] + 1
            gone = [released[earlier] for earlier in sequence[: k - depth] if earlier in released]
            starts[index] = max([in_use, *[at for at in gone if at <= needed[index]]])
    return starts


def _by_deadline(graph: fx.Graph, places: _Places, context: PassContext) -> dict[int, int]:
    """The latest place from which each gather is still done when it is needed."""
    assert context.hardware is not None
    clock, needed = _clock(graph, places.anchors, context), places.needed
    starts: dict[int, int] = {}
    next_start = float("inf")
    for index in reversed(places.sequence):
        next_start = min(clock[needed[index]], next_start) - _gather_seconds(index, context) * MARGIN
        place = needed[index]
        while place > 0 and clock[place] > next_start:
            place -= 1
        starts[index] = place
    return starts


def _gather_seconds(index: int, context: PassContext) -> float:
    """Time the link needs for a bucket. In backward it carries the reduction of another bucket in the meantime."""
    bucket, hardware = context.buckets[index], context.hardware
    assert hardware is not None
    profile = context.profile or Profile()
    seconds = profile.gather(bucket.name)
    if seconds is None:
        seconds = gather_seconds(bucket, bucket.gathered_bytes, hardware)
    if context.phase is Phase.BACKWARD and bucket.trainable:
        reduce = profile.reduce(bucket.name)
        seconds += reduce_seconds(bucket, bucket.grad_bytes, hardware) if reduce is None else reduce
        if bucket.adds_replicas and link(bucket, hardware) == link(bucket, hardware, replicas=True):
            seconds += replicas_seconds(bucket, bucket.grad_bytes, hardware)
    return seconds


def _clock(graph: fx.Graph, anchors: list[fx.Node | None], context: PassContext) -> list[float]:
    """When compute reaches each anchor, by a profile or the cost model, and without waiting for anything."""
    assert context.hardware is not None
    dtype = max(context.buckets, key=lambda bucket: bucket.layout.numel).param_dtype
    recorded = context.profile
    if recorded is not None and not recorded.fits(context.phase, (event for _, event in events(graph))):
        recorded = None
    places = set(anchors)
    now, flops, traffic = 0.0, 0, 0
    clock = [0.0]
    for node in graph.nodes:
        if node in places:
            seconds = recorded.compute(context.phase, len(clock) - 1) if recorded is not None else None
            if seconds is None and (flops or traffic):
                seconds = context.hardware.compute_seconds(flops, traffic, dtype)
            now += seconds or 0.0
            flops = traffic = 0
            clock.append(now)
        elif event_of(node) is None:
            flops += node_flops(node)
            traffic += node_traffic(node)
    return clock


def _move(
    launches: Mapping[int, fx.Node],
    sequence: list[int],
    starts: dict[int, int],
    anchors: list[fx.Node | None],
    why: dict[int, str],
) -> None:
    behind: dict[int, fx.Node] = {}
    previous = 0
    for index in sequence:
        launch = launches[index]
        previous = place = max(starts[index], previous)  # first needed, first started
        anchor = behind.get(place, anchors[place])
        reason = "at the start" if place == 0 else why[index]
        put_behind(launch, anchor)
        behind[place] = launch
        launch.meta[META] = replace(launch.meta[META], why=reason)


def put_behind(launch: fx.Node, anchor: fx.Node | None) -> None:
    """Move a node behind another and what unpacks that one; without another, to the start of the graph."""
    if anchor is None:
        first = next(node for node in launch.graph.nodes if node.op not in ("placeholder", "get_attr"))
        if launch is not first:
            first.prepend(launch)
        return
    while anchor.next is not launch and _unpacks(anchor.next):
        anchor = anchor.next
    if anchor.next is not launch:
        anchor.append(launch)


def _unpacks(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.meta.get(META) is not None
