"""The periods of a graph whose layers repeat: which layer a node belongs to, and how two layers compare.

A *period* is a stretch of nodes from the first use of one layer's parameters to the first use of the next one's. Where
it is cut does not matter, as long as two of them are equal but for their references: to the same node outside, or to
nodes and parameters that lie one period apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxshard.passes.aliases import readers

Member = tuple[int, str]
"""(layer, the rest of the name) of a parameter or buffer that belongs to a repeated layer."""


class Unrepeatable(BaseException):
    """The joint graph of a shortened model does not repeat: trace all of it. Not an error, so nothing wraps it."""


class Line:
    """The nodes of a graph in order, and how two stretches of them compare."""

    def __init__(self, graph: fx.Graph, member: dict[fx.Node, Member | None]) -> None:
        self.nodes = list(graph.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        self.member = member
        self.boundary = len(self.nodes)
        """Where backward begins."""
        self.fw_period = 0
        self.bw_period = 0

    def first_uses(self, layers: Iterable[int], *, backward: bool = False) -> list[int] | None:
        """Where each layer's parameters, or views of them, are first used in one direction; None if one's never are."""
        found: dict[int, int] = {}
        for node, member in self.member.items():
            for user in readers([node]) if member is not None else ():
                assert member is not None
                position = self.at[user]
                if (position >= self.boundary) == backward and user.op != "output":
                    found[member[0]] = min(found.get(member[0], position), position)
        wanted = list(layers)
        return [found[layer] for layer in wanted] if all(layer in found for layer in wanted) else None

    def equal(self, start: int, other: int, length: int) -> bool:
        """Whether two stretches compute the same from what lies one period apart; ``start`` is the earlier layer's."""
        return all(self.alike(self.nodes[start + o], self.nodes[other + o]) for o in range(length))

    def alike(self, low: fx.Node, high: fx.Node) -> bool:
        """Whether two nodes do the same to what lies one period apart; ``low`` is the earlier layer's."""
        apart = zip(references(low), references(high), strict=False)
        return same_operation(low, high) and all(self.moves(a, b) is not None for a, b in apart)

    def moves(self, low: fx.Node, high: fx.Node) -> bool | None:
        """Whether a reference moves with its layer (True), stays where it is (False), or fits neither (None)."""
        if low is high:
            return False
        a, b = self.member.get(low), self.member.get(high)
        if a is not None or b is not None:
            return True if a is not None and b is not None and (a[0] + 1, a[1]) == b else None
        if low.op == "placeholder" or high.op == "placeholder":
            return None
        forward = self.at[low] < self.boundary
        if forward != (self.at[high] < self.boundary):
            return None
        apart = self.at[high] - self.at[low]
        return True if apart == (self.fw_period if forward else -self.bw_period) else None


def same_operation(low: fx.Node, high: fx.Node) -> bool:
    """Whether two nodes call the same on the same kinds of values."""
    if low.op != high.op or low.target != high.target or _skeleton(low) != _skeleton(high):
        return False
    return bool(described(low.meta.get("val")) == described(high.meta.get("val")))


def references(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, in order, each as often as it is there."""
    refs: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), refs.append)  # type: ignore[arg-type]
    return refs


def _skeleton(node: fx.Node) -> str:
    """A node's arguments without the nodes among them."""
    return str(fx.map_arg((node.args, node.kwargs), lambda _: None))  # type: ignore[arg-type, return-value]


def described(value: Any) -> Any:
    """What kind of value a node has."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(described(item) for item in value)
    return value if isinstance(value, (int, float, bool, str)) else type(value)
