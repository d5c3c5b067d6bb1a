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
from dataclasses import replace

from torch import fx

from fxshard.config import Options
from fxshard.events import META, Kind, Phase, event_of, events
from fxshard.passes.context import PassContext
from fxshard.plan.cost import node_flops, node_traffic
from fxshard.plan.transfers import gather_seconds, link, reduce_seconds, replicas_seconds
from fxshard.profile import Profile

LEADING = 2


def leading(options: Options) -> int:
    """How many gathers forward starts with, whatever durations say.

    An optimizer step gathers these for the next forward. Ranks whose batches differ have other durations, but must
    gather the same: so only the options decide. Under a budget it is the first alone, which always stands there.
    """
    if options.prefetch is not None:
        return max(1, options.prefetch)
    return LEADING if options.memory_budget is None else 1


MARGIN = 1.25
"""Estimates of durations are stretched by this: a gather that starts a little early costs little, a late one stalls."""


def order_prefetch(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    nodes: dict[Kind, dict[int, fx.Node]] = {kind: {} for kind in Kind}
    for node, event in events(graph):
        nodes[event.kind][event.bucket_index] = node
    sequence = sorted(nodes[Kind.UNSHARD], key=_positions(graph, nodes[Kind.WAIT]).__getitem__)
    if not sequence:
        return module
    anchors = _anchors(graph)
    order = {anchor: i for i, anchor in enumerate(anchors)}
    needed = {index: _anchor_of(nodes[Kind.WAIT][index], order) for index in sequence}
    released = {index: order[node] for index, node in nodes[Kind.RESHARD].items()}

    depth = context.ahead
    earliest = _by_depth(sequence, needed, released, depth)
    starts = earliest
    why = dict.fromkeys(sequence, f"{depth} ahead")
    if context.by_deadline and context.hardware is not None:
        latest = _by_deadline(graph, sequence, needed, anchors, context)
        starts = {index: max(earliest[index], min(latest[index], needed[index])) for index in sequence}
        for index in sequence:
            hidden = latest[index] >= earliest[index]
            why[index] = "latest start that hides it" if hidden else f"as early as {depth} ahead allows"
        if context.phase is Phase.FORWARD:
            starts |= dict.fromkeys(sequence[: leading(context.options)], 0)
    _move(graph, nodes[Kind.UNSHARD], sequence, starts, anchors, why)
    return module


def _positions(graph: fx.Graph, waits: Mapping[int, fx.Node]) -> dict[int, int]:
    at = {node: i for i, node in enumerate(graph.nodes)}
    return {index: at[node] for index, node in waits.items()}


def _anchors(graph: fx.Graph) -> list[fx.Node | None]:
    """Where a gather may start: at the beginning (None), or behind any runtime node that is not itself a gather."""
    return [None, *[node for node, event in events(graph) if event.kind is not Kind.UNSHARD]]


def _anchor_of(wait: fx.Node, order: Mapping[fx.Node | None, int]) -> int:
    """The last place before a wait."""
    return order[wait] - 1


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


def _by_deadline(
    graph: fx.Graph, sequence: list[int], needed: dict[int, int], anchors: list[fx.Node | None], context: PassContext
) -> dict[int, int]:
    """The latest place from which each gather is still done when it is needed."""
    assert context.hardware is not None
    clock = _clock(graph, anchors, context)
    starts: dict[int, int] = {}
    next_start = float("inf")
    for index in reversed(sequence):
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
    graph: fx.Graph,
    launches: Mapping[int, fx.Node],
    sequence: list[int],
    starts: dict[int, int],
    anchors: list[fx.Node | None],
    why: dict[int, str],
) -> None:
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    behind: dict[int, fx.Node] = {}
    previous = 0
    for index in sequence:
        launch = launches[index]
        previous = place = max(starts[index], previous)  # first needed, first started
        anchor = behind.get(place, anchors[place])
        reason = "at the start" if place == 0 else why[index]
        if anchor is None:
            if launch is not first:
                first.prepend(launch)
        else:
            while anchor.next is not launch and _unpacks(anchor.next):
                anchor = anchor.next
            if anchor.next is not launch:
                anchor.append(launch)
        behind[place] = launch
        launch.meta[META] = replace(launch.meta[META], why=reason)


def _unpacks(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.meta.get(META) is not None
