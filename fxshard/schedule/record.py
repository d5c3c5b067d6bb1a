"""From scheduled graphs to the events of a :class:`Schedule`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile

import torch
from torch import fx

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.cost import node_float8_flops, node_flops, node_traffic
from fxshard.planner.memory import MemoryPlan
from fxshard.planner.model_groups import ModelGroup
from fxshard.schedule.activations import Activations, step_activations
from fxshard.schedule.collectives import groups_of
from fxshard.schedule.dependencies import with_dependencies
from fxshard.schedule.events import META, OF_MODEL, Event, Kind, Phase, event_of, of_many
from fxshard.schedule.graph_summary import WRITES, GraphSummary, bucket_viewed_by, computes, summary
from fxshard.schedule.offloads import Offloaded, Recomputed
from fxshard.schedule.scales import scales_event
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.updates import update, updates

STEP_COUNT = 4
"""Bytes of AdamW's step count, which every parameter has on every rank."""


def record(
    graphs: Mapping[Phase, fx.GraphModule],
    buckets: Sequence[BucketPlan],
    memory: MemoryPlan,
    *,
    ranks: int,
    zero: int,
    budget: int | None = None,
    carry: int = 0,
    fused: bool = False,
    recomputed: tuple[Recomputed, ...] = (),
    offloaded: tuple[Offloaded, ...] = (),
) -> Schedule:
    """The schedule of a step (or an evaluation) from its graphs, with the stretches of compute between the events.

    With an optimizer of ``fxshard``'s own, up to ``carry`` gathers that a forward starts with stand in the optimizer
    phase of the step before. Any other optimizer is taken for AdamW, and its step ends before anything is gathered.
    ``fused``: stretches are compiled, so that not every value in them is written to memory.
    """
    held = step_activations(graphs, fused)
    found = [event for phase, module in graphs.items() for event in _events_of(module.graph, phase, held[phase])]
    summaries = tuple(summary(module.graph, phase) for phase, module in graphs.items())
    made = assemble(found, summaries, buckets, memory, ranks=ranks, zero=zero, carry=carry)
    groups = model_groups(graphs)
    return replace(made, budget=budget, model_groups=groups, recomputed=recomputed, offloaded=offloaded)


def assemble(
    found: list[Event],
    graphs: tuple[GraphSummary, ...],
    buckets: Sequence[BucketPlan],
    memory: MemoryPlan,
    *,
    ranks: int,
    zero: int,
    carry: int = 0,
) -> Schedule:
    """The schedule of a step from the events of its graphs."""
    phases = [each.phase for each in graphs]
    if Phase.BACKWARD in phases:
        reduced = {event.bucket_index: event for event in found if event.kind is Kind.REDUCE}
        if carry:
            carried = _carried(found, buckets, reduced, carry)
            found = [event for event in found if event is not carried.get(event.bucket_index)]
            found += updates(reduced, buckets, carried, _group(found))
        elif any(buckets[index].shares_state for index in reduced):
            found += updates(reduced, buckets, {}, _group(found))
        else:
            found = [*found, *(update(event, buckets[index]) for index, event in reduced.items())]
    scales = scales_event(buckets, phases[0], _group(found))
    found = found if scales is None else [scales, *found]
    events = tuple(with_dependencies(found, buckets))
    return Schedule(events, tuple(buckets), memory.bytes, resident_bytes(buckets), ranks, zero, graphs=graphs)


def resident_bytes(buckets: Sequence[BucketPlan]) -> int:
    """Bytes that a rank holds all the time: shards, gradients, optimizer state with a step count per parameter."""
    counts = sum(STEP_COUNT * len(bucket.params) for bucket in buckets if bucket.trainable)
    return counts + sum(rest.param + rest.grad + rest.state for rest in (bucket.at_rest() for bucket in buckets))


def model_groups(graphs: Mapping[Phase, fx.GraphModule]) -> tuple[ModelGroup, ...]:
    """The process groups that a step's graphs communicate in themselves."""
    return tuple(dict.fromkeys(group for module in graphs.values() for group in groups_of(module.graph)))


def _events_of(graph: fx.Graph, phase: Phase, held: Activations) -> list[Event]:
    parts = stretches(graph, phase, held)
    return [part if isinstance(part, Event) else event_at(part, held) for part in parts]


def event_at(node: fx.Node, held: Activations) -> Event:
    """The record of a runtime node. What a collective of the model's own sends is known now that parameters are."""
    event: Event = node.meta[META]
    if event.kind not in OF_MODEL:
        return event
    start = node.all_input_nodes[0] if event.kind is Kind.AWAIT else node
    sources = [bucket_viewed_by(arg) for arg in start.all_input_nodes]
    reads = tuple(sorted({source.bucket_index for source in sources if source is not None}))
    return replace(event, reads=reads, peak=held.during[node] if node is start else 0)


def stretches(graph: fx.Graph, phase: Phase, held: Activations) -> Iterator[fx.Node | Event]:
    """Runtime nodes, and what is computed between them as one event each, in order."""
    stretch: list[fx.Node] = []
    for node in graph.nodes:
        if event_of(node) is not None:
            if stretch:
                yield _compute(stretch, phase, held)
                stretch = []
            yield node
        elif computes(node):
            stretch.append(node)
    if stretch:
        yield _compute(stretch, phase, held)


def _compute(nodes: list[fx.Node], phase: Phase, held: Activations) -> Event:
    reads: set[int] = set()
    writes: set[int] = set()
    for node in nodes:
        for arg in node.all_input_nodes:
            source = bucket_viewed_by(arg)
            if source is not None:
                written = node.target in WRITES and source.kind is Kind.GRAD
                (writes if written else reads).add(source.bucket_index)
    return of_many(
        Kind.COMPUTE,
        phase,
        _dtype(nodes),
        f"{nodes[0].name} … {nodes[-1].name}" if len(nodes) > 1 else nodes[0].name,
        reads=tuple(sorted(reads)),
        writes=tuple(sorted(writes)),
        flops=sum(node_flops(node) for node in nodes),
        float8_flops=sum(node_float8_flops(node) for node in nodes),
        traffic=sum(node_traffic(node) for node in nodes),
        held=held.after[nodes[-1]],
        peak=max(held.peak(nodes), held.after[nodes[-1]]),
        nodes=len(nodes),
    )


def _dtype(nodes: list[fx.Node]) -> torch.dtype:
    """The dtype that a stretch mostly computes in: that of its first matrix product, else of its first result."""
    values = {node: node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)}
    products = [value for node, value in values.items() if node_flops(node)]
    return (products or [*values.values(), torch.empty(0)])[0].dtype


def _carried(
    events: list[Event], buckets: Sequence[BucketPlan], reduced: Mapping[int, Event], most: int
) -> dict[int, Event]:
    """The gathers at the head of forward, of buckets that the step before updates. What is resident has its place.

    The head ends at what rests in float8: that is quantized with scales that are known when every bucket is updated.
    """

    def in_head(event: Event) -> bool:
        return event.kind is Kind.UNSHARD and not buckets[event.bucket_index].scale_shapes

    head = islice(takewhile(in_head, events), most)
    return {
        event.bucket_index: event
        for event in head
        if event.bucket_index in reduced and not buckets[event.bucket_index].resident
    }


def _group(events: list[Event]) -> str:
    """The model's own process group, as a graph's collectives name it."""
    return next((event.group for event in events if event.kind in (Kind.UNSHARD, Kind.REDUCE)), "none")
