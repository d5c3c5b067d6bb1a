"""Saved activations that a budget has computed again or kept on the host, and the graphs' records of their copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxshard.planner.cost import tensor_bytes
from fxshard.schedule.aliases import is_view, readers
from fxshard.schedule.events import Kind, event_of, events


@dataclass(frozen=True)
class _Values:
    """Values of one kind, one or more in each layer of a kind."""

    name: str
    """The module that computes them, layers counted as ``*``, and the operator."""
    count: int
    bytes: int
    """Their bytes together from forward to backward, on the device or on the host."""
    seconds: float
    """The time to compute them again, or to copy them each way, by the cost model."""


class Recomputed(_Values):
    """Values that backward computes again instead of reading them, counted in the graph that was traced, in which
    layers that repeat stand once."""


class Offloaded(_Values):
    """Values that are on the host between forward and backward. Those that backward reads first stay on the device."""


@dataclass(frozen=True)
class HostCopy:
    """A graph's record of an activation that it offloads or gets back; the verifier checks the events against it."""

    op: str
    bytes: int
    dtype: torch.dtype
    node: int
    """How many of the graph's computing nodes must be over before it leaves, or may be over when it is back."""


def described(graph: fx.Graph, number: Mapping[fx.Node, int]) -> tuple[HostCopy, ...]:
    """The copies of a graph in their order, as its edges have them; ``number``: of its computing nodes."""
    found: dict[int, HostCopy] = {}
    for node, event in events(graph):
        if event.kind not in (Kind.OFFLOAD, Kind.RELOAD):
            continue
        value = node.meta["val"]
        if event.kind is Kind.OFFLOAD:
            at = max((number[made] + 1 for made in _makers(node.all_input_nodes[0]) if made in number), default=0)
        else:
            at = min((number[reader] for reader in readers([node]) if reader in number), default=len(number))
        found[event.number] = HostCopy(event.op, tensor_bytes(value), value.dtype, at)
    return tuple(found[i] for i in sorted(found))


def _makers(node: fx.Node) -> list[fx.Node]:
    """A node, and what it is a view of."""
    found = [node]
    while is_view(node) and event_of(node) is None:
        node = node.all_input_nodes[0]
        found.append(node)
    return found
