"""Step: what the graphs of a step will do, as data that is ordered and simulated many times.

Gathers are never moved into a stretch of compute, so what is decided about events gives the schedule of the graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxshard.passes.context import PassContext
from fxshard.passes.decide import Decisions
from fxshard.passes.timeline import Entry, PhaseTimeline, Timeline
from fxshard.planner.model_groups import ModelGroup
from fxshard.schedule.activations import step_activations
from fxshard.schedule.events import Event, Phase
from fxshard.schedule.graph_summary import GraphSummary, summary
from fxshard.schedule.record import assemble, event_at, model_groups, stretches
from fxshard.schedule.schedule import Schedule

Stretch = tuple[int, Event]
"""A stretch of compute, and how many runtime nodes of its graph stand before it."""


@dataclass(frozen=True)
class Draft:
    """The events of a step whose order is not decided, and what is computed between them."""

    timeline: Timeline
    stretches: Mapping[Phase, tuple[Stretch, ...]]
    graphs: tuple[GraphSummary, ...]
    activations: int
    """The most that values besides buckets take, temporaries included."""
    model_groups: tuple[ModelGroup, ...] = ()

    @classmethod
    def of(cls, modules: Mapping[Phase, fx.GraphModule], fused: bool) -> Draft:
        held = step_activations(modules, fused)
        found: dict[Phase, tuple[Stretch, ...]] = {}
        events: list[Event] = []
        for phase, module in modules.items():
            before, own = len(events), list[Stretch]()
            for part in stretches(module.graph, phase, held[phase]):
                if isinstance(part, Event):
                    own.append((len(events) - before, part))
                else:
                    events.append(event_at(part, held[phase]))
            found[phase] = tuple(own)
        summaries = tuple(summary(module.graph, phase) for phase, module in modules.items())
        computed = [event for own in found.values() for _, event in own]
        peak = max((event.peak for event in (*events, *computed)), default=0)
        timeline = Timeline.of(modules).with_events(events)
        return cls(timeline, found, summaries, peak, model_groups(modules))

    def decided(self, decisions: Decisions, context: PassContext, carries: bool) -> Schedule:
        """The schedule of the graphs once they are what was decided."""
        events = [event for part in decisions.timeline.phases for event in _in_order(part, self.stretches[part.phase])]
        made = assemble(
            events,
            self.graphs,
            context.buckets,
            decisions.memory,
            ranks=context.ranks,
            zero=context.options.zero,
            carry=decisions.memory.leading if carries else 0,
        )
        return replace(made, budget=context.options.budget, model_groups=self.model_groups)


def _in_order(part: PhaseTimeline, computed: Sequence[Stretch]) -> list[Event]:
    """Events with what is computed before each; between two that are left it is one stretch."""
    ahead = list(reversed(computed))
    events: list[Event] = []
    for entry in part.entries:
        if isinstance(entry, Entry):
            before: list[Event] = []
            while ahead and ahead[-1][0] <= entry.node:
                before.append(ahead.pop()[1])
            events += _joined(before)
        events.append(entry.event)
    return [*events, *_joined([event for _, event in reversed(ahead)])]


def _joined(stretch: Sequence[Event]) -> list[Event]:
    if len(stretch) < 2:
        return list(stretch)
    first, last = stretch[0].why.split(" … ")[0], stretch[-1].why.split(" … ")[-1]
    return [
        replace(
            next((event for event in stretch if event.flops), stretch[0]),
            why=f"{first} … {last}",
            reads=tuple(sorted({index for event in stretch for index in event.reads})),
            writes=tuple(sorted({index for event in stretch for index in event.writes})),
            flops=sum(event.flops for event in stretch),
            float8_flops=sum(event.float8_flops for event in stretch),
            traffic=sum(event.traffic for event in stretch),
            held=stretch[-1].held,
            peak=max(event.peak for event in stretch),
            nodes=sum(event.nodes for event in stretch),
        )
    ]
