"""The events of a step as data, read from the graphs once: what the rules that order a step work on.

Gathers are what a step can be ordered by; all other events stay where they are. So the timeline of a graph is its other
events, each with what is computed before it, and its gathers, each with the event after which it starts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from torch import fx

from fxshard.planner.cost import node_float8_flops, node_flops, node_traffic
from fxshard.schedule.events import Event, Kind, Phase, event_of

START = -1
"""In place of an event: the beginning of the graph."""


def goes(event: Event) -> bool:
    """Whether an event is superfluous where its bucket stays gathered from forward to backward."""
    return event.kind is _GONE.get(event.phase)


_GONE = {Phase.FORWARD: Kind.RESHARD, Phase.BACKWARD: Kind.UNSHARD}


@dataclass(frozen=True)
class Entry:
    """An event, and the compute between the previous one that is no gather and this one."""

    event: Event
    node: int
    """Which of the graph's runtime nodes it is, counted from 0."""
    flops: int = 0
    traffic: int = 0
    float8_flops: int = 0
    """Of ``flops``, those of products in float8."""


@dataclass(frozen=True)
class Gather:
    """The start of a gather."""

    event: Event
    node: int
    after: int = START
    """The runtime node after which it stands, which is no gather. It keeps the place of one that is removed."""

    @property
    def bucket(self) -> int:
        return self.event.bucket_index


E = TypeVar("E", Entry, Gather)


@dataclass(frozen=True)
class PhaseTimeline:
    """The events of one graph. A *place* is a number of others after which a gather stands."""

    phase: Phase
    others: tuple[Entry, ...]
    gathers: tuple[Gather, ...]

    @classmethod
    def of(cls, phase: Phase, graph: fx.Graph) -> PhaseTimeline:
        others: list[Entry] = []
        gathers: list[Gather] = []
        flops = traffic = in_float8 = 0
        for node in graph.nodes:
            event, number = event_of(node), len(others) + len(gathers)
            if event is None:
                flops += node_flops(node)
                in_float8 += node_float8_flops(node)
                traffic += node_traffic(node)
            elif event.kind is Kind.UNSHARD:
                gathers.append(Gather(event, number, others[-1].node if others else START))
            else:
                others.append(Entry(event, number, flops, traffic, in_float8))
                flops = traffic = in_float8 = 0
        return cls(phase, tuple(others), tuple(gathers))

    @cached_property
    def entries(self) -> tuple[Entry | Gather, ...]:
        """All of them in order."""
        both: list[Entry | Gather] = [*self.others, *self.gathers]
        return tuple(sorted(both, key=lambda e: (e.after, 1) if isinstance(e, Gather) else (e.node, 0)))

    def places(self, kind: Kind) -> dict[int, int]:
        """{bucket: the place right before its event of a kind}"""
        return {entry.event.bucket_index: i for i, entry in enumerate(self.others) if entry.event.kind is kind}

    def place(self, gather: Gather) -> int:
        return bisect_right([entry.node for entry in self.others], gather.after)

    def node_before(self, place: int) -> int:
        return self.others[place - 1].node if place else START

    def keeping(self, buckets: Collection[int]) -> PhaseTimeline:
        """Without what :func:`goes` if buckets are kept; what was computed before it is computed before the next."""
        others: list[Entry] = []
        flops = traffic = in_float8 = 0
        for entry in self.others:
            flops, traffic, in_float8 = flops + entry.flops, traffic + entry.traffic, in_float8 + entry.float8_flops
            if entry.event.bucket_index not in buckets or not goes(entry.event):
                same = (flops, traffic, in_float8) == (entry.flops, entry.traffic, entry.float8_flops)
                others.append(entry if same else replace(entry, flops=flops, traffic=traffic, float8_flops=in_float8))
                flops = traffic = in_float8 = 0
        gathers = tuple(gather for gather in self.gathers if gather.bucket not in buckets or not goes(gather.event))
        return replace(self, others=tuple(others), gathers=gathers)


@dataclass(frozen=True)
class Timeline:
    """The events of a step, graph after graph."""

    phases: tuple[PhaseTimeline, ...]

    @classmethod
    def of(cls, modules: Mapping[Phase, fx.GraphModule]) -> Timeline:
        return cls(tuple(PhaseTimeline.of(phase, module.graph) for phase, module in modules.items()))

    @cached_property
    def entries(self) -> tuple[Entry | Gather, ...]:
        return tuple(entry for part in self.phases for entry in part.entries)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        return tuple(entry.event for entry in self.entries)

    def of_phase(self, phase: Phase) -> PhaseTimeline | None:
        return next((part for part in self.phases if part.phase is phase), None)

    def each(self, change: Callable[[PhaseTimeline], PhaseTimeline]) -> Timeline:
        return Timeline(tuple(map(change, self.phases)))

    def with_events(self, events: Iterable[Event]) -> Timeline:
        """The same with other records of its events, in order."""
        given = iter(events)

        def change(part: PhaseTimeline) -> PhaseTimeline:
            records = {entry.node: next(given) for entry in part.entries}

            def noted(entry: E) -> E:
                event = records[entry.node]
                return entry if event is entry.event else replace(entry, event=event)

            others, gathers = tuple(map(noted, part.others)), tuple(map(noted, part.gathers))
            return replace(part, others=others, gathers=gathers)

        return self.each(change)

    def keeping(self, buckets: Collection[int]) -> Timeline:
        """With buckets that stay gathered from forward to backward."""
        return self.each(lambda part: part.keeping(buckets))
