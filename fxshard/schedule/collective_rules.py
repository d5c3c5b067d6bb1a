"""Rules for the model's own collectives: one order on every rank, operands there, results waited for once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fxshard.schedule.bucket_rules import MOST_RANKS
from fxshard.schedule.collectives import ModelCollective
from fxshard.schedule.events import OF_HOST, OF_MODEL, Event, Kind
from fxshard.schedule.graph_summary import GraphSummary
from fxshard.schedule.step import COMPUTES_NOTHING, OF_NO_BUCKET, Step


def collectives_have_one_order(step: Step) -> None:
    """Ranks start the model's own collectives in the order in which the model makes them, across all of its groups.

    All ranks run the same model, so that order is the same on each. None may depend on what a rank computes: a
    collective in a branch (``torch.cond``) would be made by some ranks and not by others.
    """
    rule, schedule = collectives_have_one_order, step.schedule
    names = [group.name for group in schedule.model_groups]
    possible = all(1 <= min(g.ranks, g.stride) <= max(g.ranks, g.stride) <= MOST_RANKS for g in schedule.model_groups)
    if len(set(names)) < len(names) or not possible:
        step.fails(rule, f"{schedule.model_groups} are no groups that a model communicates in")
    for i, event in enumerate(schedule.events):
        if event.kind not in (*OF_MODEL, *OF_HOST) and (event.op or event.number != -1):
            step.broken(rule, i, f"is called {event.op!r}, number {event.number}, but is no collective of the model's")
    for graph in schedule.graphs:
        for collective in graph.collectives:
            if collective.branch:
                step.fails(
                    rule,
                    f"{collective.op} stands in a branch of {collective.branch} in the {graph.phase} graph. Ranks "
                    "whose data differ take different branches, and wait for each other for ever: take it out of it",
                )
        events = [(i, event) for i, event in schedule.of(Kind.COLLECTIVE, phase=graph.phase)]
        for number, (i, event) in enumerate(events):
            if event.number != number:
                what = f"is the model's {event.op} number {event.number}, but starts as number {number}"
                step.broken(rule, i, f"{what}: ranks that start collectives in different orders hang")
        if len(events) != len(graph.collectives):
            step.fails(rule, f"{graph.phase} starts {len(events)} collectives, its graph has {len(graph.collectives)}")
    used = {event.group for event in schedule.events if event.kind in OF_MODEL}
    if used != set(names):
        step.fails(rule, f"the model's groups are {sorted(names)}, but events are in {sorted(used)}")


def collectives_are_those_of_the_graphs(step: Step) -> None:
    """Each collective of the model's own is the one in its graph: operands are there, the result is awaited in time.

    Both follow from how many nodes of the graph are computed by then.
    """
    for graph in step.schedule.graphs:
        _of_graph(step, graph)


def _of_graph(step: Step, graph: GraphSummary) -> None:
    rule = collectives_are_those_of_the_graphs
    computed, started = 0, set[int]()
    awaited: Counter[int] = Counter()
    for i, event in enumerate(step.schedule.events):
        if event.phase is not graph.phase:
            continue
        computed += event.nodes if event.kind is Kind.COMPUTE else 0
        if event.kind not in OF_MODEL:
            continue
        if not 0 <= event.number < len(graph.collectives):
            step.broken(rule, i, f"is number {event.number}; the graph has {len(graph.collectives)}")
        source = graph.collectives[event.number]
        step.has_right(rule, i, _wanted(event, source))
        if event.kind is Kind.COLLECTIVE:
            missing = [need for need in source.needs if not _over(graph, need, started, awaited)]
            if computed < source.after or missing:
                step.broken(rule, i, "starts before what it sends is computed")
            started.add(event.number)
        else:
            if event.number not in started:
                step.broken(rule, i, "waits for a collective that is not started")
            awaited[event.number] += 1
            if computed > source.before:
                step.broken(rule, i, "comes after something reads what it waits for")
    for number, source in enumerate(graph.collectives):
        if not 0 <= min(source.after, source.before) <= max(source.after, source.before) <= graph.nodes:
            step.fails(rule, f"collective {number} of {graph.phase} is between nodes that its graph does not have")
        if awaited[number] != source.waits:
            what = f"waits {awaited[number]} times for collective {number}, its graph {source.waits} times"
            step.fails(rule, f"{graph.phase} {what}")


def _over(graph: GraphSummary, number: int, started: set[int], awaited: Counter[int]) -> bool:
    """Whether a collective's result is there."""
    if not 0 <= number < len(graph.collectives):
        return False
    return number in awaited if graph.collectives[number].waits else number in started


def _wanted(event: Event, source: ModelCollective) -> dict[str, Any]:
    own_stream = event.kind is Kind.COLLECTIVE and source.waits > 0
    return {
        **{field: getattr(source, field) for field in ("op", "group", "bytes", "dtype", "reads")},
        **{**OF_NO_BUCKET, "writes": (), "stream": source.group if own_stream else "compute"},
        **{**COMPUTES_NOTHING, "peak": 0 if event.kind is Kind.AWAIT else event.peak},
    }
