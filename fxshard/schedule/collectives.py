"""Collectives of the model's own as they stand in a graph: their events, and what the graph says of them.

An operator of torch's is the runtime node: it carries its :class:`Event` like ours do, and stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fxshard._torch import private
from fxshard.planner.cost import tensor_bytes
from fxshard.planner.model_groups import ModelGroup
from fxshard.schedule.events import META, Event, Kind, Phase, event_of, of_many

GROUP = "fxshard_group"
"""Key of ``node.meta``: the :class:`ModelGroup` of a collective, which is known where process groups are."""


@dataclass(frozen=True)
class ModelCollective:
    """A graph's record of a collective of its own, against which the verifier checks the events."""

    op: str
    group: str
    bytes: int
    dtype: torch.dtype
    reads: tuple[int, ...]
    """Buckets whose parameters it sends as they are."""
    after: int
    """How many of the graph's computing nodes must be over before it starts."""
    needs: tuple[int, ...]
    """The graph's collectives that must be over before it starts."""
    before: int
    """How many of the graph's computing nodes may be over when its result is waited for."""
    waits: int
    """How often that is; 0 where it is over when its operator returns."""
    branch: str = ""
    """The operator whose branch it stands in, where that is not the graph itself."""


def stamp(graph: fx.Graph, phase: Phase) -> None:
    """Make events of the collectives of a graph, numbered in the order in which they stand, and of their waits."""
    starts = [node for node in graph.nodes if private.collective_name(node) is not None]
    for number, start in enumerate(starts):
        start.meta[META] = _event(start, Kind.COLLECTIVE, phase, number)
        for wait in filter(private.is_wait, start.users):
            wait.meta[META] = _event(start, Kind.AWAIT, phase, number)


def _event(start: fx.Node, kind: Kind, phase: Phase, number: int) -> Event:
    value = _sent(start)
    synchronous = kind is Kind.AWAIT or private.is_synchronous(start)
    group: ModelGroup = start.meta[GROUP]
    stream = "compute" if synchronous else group.name
    about = {"bytes": tensor_bytes(value), "op": str(private.collective_name(start)), "number": number}
    return of_many(kind, phase, _dtype(value), start.name, **about, group=group.name, stream=stream)


def _sent(start: fx.Node) -> object:
    """The full buffer: what a gather makes, what all others start from."""
    if "all_gather" in str(private.collective_name(start)):
        return start.meta["val"]
    given = [node.meta.get("val") for node in start.all_input_nodes]
    return [value for value in given if isinstance(value, torch.Tensor)]


def _dtype(value: object) -> torch.dtype:
    first = value[0] if isinstance(value, list | tuple) else value
    assert isinstance(first, torch.Tensor)
    return first.dtype


def described(
    graph: fx.Graph, number: dict[fx.Node, int], viewed: Callable[[fx.Node], Event | None]
) -> Iterator[ModelCollective]:
    """The collectives of a graph, as its edges have them; ``number``: of its computing nodes, ``viewed``: the event
    whose memory a node is a view of."""
    found: dict[int, ModelCollective] = {}  # in the order of the model, whatever that of the graph is by now
    of_wait: dict[fx.Node, int] = {}
    for node in graph.nodes:
        event = event_of(node)
        if event is None or event.kind is not Kind.COLLECTIVE:
            continue
        waits = [user for user in node.users if private.is_wait(user)]
        of_wait |= dict.fromkeys(waits or [node], event.number)
        sources = [viewed(arg) for arg in node.all_input_nodes]
        readers = [user for wait in waits or [node] for user in wait.users]
        found[event.number] = ModelCollective(
            op=str(private.collective_name(node)),
            group=node.meta[GROUP].name,
            bytes=tensor_bytes(_sent(node)),
            dtype=_dtype(_sent(node)),
            reads=tuple(sorted({source.bucket_index for source in sources if source is not None})),
            after=max((number[arg] + 1 for arg in node.all_input_nodes if arg in number), default=0),
            needs=tuple(sorted({of_wait[arg] for arg in node.all_input_nodes if arg in of_wait})),
            before=min((number[user] for user in readers if user in number), default=len(number)),
            waits=len(waits),
        )
    yield from (found[i] for i in sorted(found))
    for name, start in _in_branches(graph):
        yield ModelCollective(str(private.collective_name(start)), "", 0, torch.float32, (), 0, (), 0, 0, branch=name)


def _in_branches(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    """(operator, collective) of collectives in graphs that an operator of this one runs, or not: ``torch.cond``."""
    for node in graph.find_nodes(op="get_attr"):
        inner = getattr(graph.owning_module, str(node.target), None)
        if isinstance(inner, fx.GraphModule):
            called = next((str(user.target) for user in node.users), str(node.target))
            yield from ((called, start) for start in inner.graph.nodes if private.collective_name(start) is not None)
            yield from ((called, start) for _, start in _in_branches(inner.graph))


def groups_of(graph: fx.Graph) -> Iterator[ModelGroup]:
    """The process groups that a graph's own collectives run in, each as often as it is used."""
    for node in graph.nodes:
        if GROUP in node.meta and event_of(node) is not None:
            yield node.meta[GROUP]
