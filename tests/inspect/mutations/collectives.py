"""Mutations of a step in which the model itself communicates: in two groups, while a layer computes."""

from dataclasses import replace

import torch

from fxshard.planner.model_groups import ModelGroup
from fxshard.schedule.collectives import ModelCollective
from fxshard.schedule.events import Event, Kind, Phase
from fxshard.schedule.schedule import Schedule
from tests.inspect.mutations.editing import Broken, added, at_number, breaks, changed, moved, numbered, without
from tests.inspect.schedules import change, evaluation, relinked

TP, EP = ModelGroup("tp", 8), ModelGroup("ep", 4, 8)


def communicating() -> Schedule:
    """An evaluation of three layers: what the first two compute is summed over ranks, and read by the last."""
    schedule = evaluation(3)
    sums = tuple(
        ModelCollective("all_reduce", group.name, 4096, torch.float32, (), after=layer + 1, needs=(), before=2, waits=1)
        for layer, group in enumerate((TP, EP))
    )
    (graph,) = schedule.graphs
    schedule = replace(schedule, graphs=(replace(graph, collectives=sums),), model_groups=(TP, EP))
    for number, source in enumerate(sums):
        computes = [i for i, _ in schedule.of(Kind.COMPUTE)]
        schedule = added(schedule, computes[2], _event(Kind.AWAIT, source, number))
        schedule = added(schedule, computes[number] + 1, _event(Kind.COLLECTIVE, source, number))
    return schedule


def _event(kind: Kind, source: ModelCollective, number: int) -> Event:
    stream = source.group if kind is Kind.COLLECTIVE else "compute"
    about = (source.bytes, source.dtype, source.group, stream, "by hand")
    return Event(kind, Phase.EVAL, "", -1, (), *about, op=source.op, number=number)


@breaks(
    "collectives_have_one_order",
    not_there=lambda: (without(communicating(), numbered(communicating(), Kind.COLLECTIVE, 1)), None),
    in_a_group_that_nobody_knows=lambda: (replace(communicating(), model_groups=(TP,)), None),
)
def started_in_another_order() -> Broken:
    schedule = communicating()
    first, second = (numbered(schedule, Kind.COLLECTIVE, number) for number in (0, 1))
    return relinked(schedule, moved(schedule, first, second)), second - 1


@breaks("collectives_have_one_order")
def in_a_branch() -> Broken:
    schedule = communicating()
    (graph,) = schedule.graphs
    some = replace(graph.collectives[1], branch="cond")
    return replace(schedule, graphs=(replace(graph, collectives=(graph.collectives[0], some)),)), None


@breaks("collectives_have_one_order")
def a_gather_that_calls_itself_one() -> Broken:
    schedule = communicating()
    at = next(i for i, _ in schedule.of(Kind.UNSHARD))
    return change(schedule, at, op="all_reduce"), at


breaks(
    "collectives_are_those_of_the_graphs",
    never_waited_for=lambda: (without(communicating(), numbered(communicating(), Kind.AWAIT, 0)), None),
    of_other_bytes=lambda: changed(communicating(), Kind.COLLECTIVE, 1, bytes=1),
    on_another_stream=lambda: changed(communicating(), Kind.COLLECTIVE, 1, stream="gather"),
    sent_before_it_is_computed=lambda: at_number(
        communicating(), Kind.COLLECTIVE, 0, to=numbered(communicating(), Kind.COLLECTIVE, 0) - 1
    ),
    read_before_it_is_there=lambda: at_number(
        communicating(), Kind.AWAIT, 1, to=max(i for i, _ in communicating().of(Kind.COMPUTE))
    ),
    waited_for_before_it_starts=lambda: at_number(
        communicating(), Kind.AWAIT, 0, to=numbered(communicating(), Kind.COLLECTIVE, 0)
    ),
)
