"""Where a captured graph repeats: stretches of nodes that compute the same, one after the other.

Found by what nodes compute, not by names of modules or parameters. Two stretches are equal if their nodes call the same
on the same kinds of values, and refer to the same node outside, to nodes that lie one period apart, or to parameters of
the same kind, each layer to its own.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxshard._torch import private

Member = tuple[int, tuple[int, int]]
"""(layer, role) of an input that belongs to a repeated layer. The role says which node of a layer reads it first."""

GAPS = 8
"""Distances between equal nodes that are tried as periods, the most frequent ones."""
MULTIPLES = 6
"""Layers of several kinds may take turns: that many distances together are tried as one period."""


@dataclass(frozen=True)
class Repeat:
    """``layers`` stretches of ``period`` nodes from the node at ``start`` on."""

    start: int
    period: int
    layers: int
    members: dict[fx.Node, Member]


def find_repeat(
    module: fx.GraphModule, kinds: Sequence[Hashable | None], least: int, besides: Collection[fx.Node] = ()
) -> Repeat | None:
    """The repetition that covers most nodes, of at least ``least`` layers; None if there is none.

    ``kinds``: of each input of the graph, what must be equal for two of them to take each other's place in two layers.
    None for an input that belongs to no layer. ``besides``: nodes that are no part of it.
    """
    line = _Line(module, kinds, besides)
    found: Repeat | None = None
    for period in line.periods(least):
        repeat = line.repeat(period, least)
        if repeat is not None and (found is None or _saved(repeat) > _saved(found)):
            found = repeat
    return found


def _saved(repeat: Repeat) -> tuple[int, int]:
    return repeat.period * repeat.layers, -repeat.period


class _Line:
    """The nodes of a graph in order."""

    def __init__(self, module: fx.GraphModule, kinds: Sequence[Hashable | None], besides: Collection[fx.Node]) -> None:
        self.nodes = list(module.graph.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        inputs = module.graph.find_nodes(op="placeholder")
        self.kind = {
            node: (kind, described(node)) for node, kind in zip(inputs, kinds, strict=True) if kind is not None
        }
        self.first = next((i for i, node in enumerate(self.nodes) if node.op != "placeholder"), len(self.nodes))
        self.refs = [references(node) for node in self.nodes]
        self.operations = [_operation(module, node) if node not in besides else (node,) for node in self.nodes]

    def periods(self, least: int) -> list[int]:
        """Distances at which nodes may repeat, the shortest first."""
        last: dict[Hashable, int] = {}
        gaps: Counter[int] = Counter()
        for i in range(self.first, len(self.nodes) - 1):
            before = last.get(self.operations[i])
            last[self.operations[i]] = i
            if before is not None:
                gaps[i - before] += 1
        common = [gap for gap, _ in gaps.most_common(GAPS)]
        tried = {gap * times for gap in common for times in range(1, MULTIPLES + 1)}
        return sorted(period for period in tried if period * least <= len(self.nodes) - self.first)

    def repeat(self, period: int, least: int) -> Repeat | None:
        """The longest repetition with a period. Its first layer calls the same as the others, but may refer to other
        nodes: it follows what comes before all layers.
        """
        start, end = self._longest(lambda i: self._alike(i, period), period)
        if end - start < period:
            return None
        begin = start
        while begin > self.first and self.operations[begin - 1] == self.operations[begin - 1 + period]:
            begin -= 1
        start = self._boundary(start, begin, period)
        layers = (end - start) // period + 1
        if start - period >= begin:
            start, layers = start - period, layers + 1
        members = self._members(start, period, layers) if layers >= least else None
        return Repeat(start, period, layers, members) if members else None

    def _longest(self, holds: Callable[[int], bool], period: int) -> tuple[int, int]:
        """The longest stretch of positions that something holds for."""
        longest, begun = (0, 0), None
        for i in range(self.first, len(self.nodes) - 1 - period):
            if not holds(i):
                begun = None
                continue
            begun = i if begun is None else begun
            if i + 1 - begun > longest[1] - longest[0]:
                longest = begun, i + 1
        return longest

    def _boundary(self, start: int, begin: int, period: int) -> int:
        """The position in the first period from ``start`` on at which layers are best told apart: where the fewest
        values go from one to the next; of several, the first one that follows where operations begin to repeat.
        """
        last = {node: max((self.at[user] for user in node.users), default=0) for node in self.nodes[start:]}

        def crossing(position: int) -> int:
            return sum(last[self.nodes[i]] >= position + period for i in range(start, position + period))

        offsets = range(start, start + period)
        return min(offsets, key=lambda position: (crossing(position), (position - begin) % period))

    def _alike(self, i: int, period: int) -> bool:
        """Whether the node at ``i`` does the same as the one a period later, to what lies a period apart."""
        if self.operations[i] != self.operations[i + period]:
            return False
        return all(
            self._apart(low, high, period) for low, high in zip(self.refs[i], self.refs[i + period], strict=True)
        )

    def _apart(self, low: fx.Node, high: fx.Node, period: int) -> bool:
        if low is high:
            return True
        if low.op == "placeholder" or high.op == "placeholder":
            return low in self.kind and self.kind[low] == self.kind.get(high)
        return self.at[high] - self.at[low] == period

    def _members(self, start: int, period: int, layers: int) -> dict[fx.Node, Member] | None:
        """Which input belongs to which layer; None if one belongs to two, or is read by several in one place."""
        members: dict[fx.Node, Member] = {}
        fixed: set[fx.Node] = set()
        for offset in range(period):
            for j, first in enumerate(self.refs[start + period + offset]):
                if first.op != "placeholder":
                    continue
                chain = [self.refs[start + offset + layer * period][j] for layer in range(1, layers)]
                if all(node is first for node in chain):
                    fixed.add(first)
                    continue
                role = members[first][1] if first in members else (offset, j)
                for layer, node in enumerate(chain, 1):
                    if members.setdefault(node, (layer, role)) != (layer, role):
                        return None
                before = self.refs[start + offset][j : j + 1]
                if before and before[0] in self.kind and self.kind[before[0]] == self.kind[first]:
                    members.setdefault(before[0], (0, role))
        return None if fixed & set(members) else members


def references(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, in order, each as often as it is there."""
    refs: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), refs.append)  # type: ignore[arg-type]
    return refs


_NODE = "%"


def skeleton(node: fx.Node) -> str:
    """A node's arguments with a sign in the place of each node among them."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: _NODE))  # type: ignore[arg-type, return-value]


def described(node: fx.Node) -> Hashable:
    """What kind of value a node has."""
    return _describe(node.meta["val"] if "val" in node.meta else node.meta.get("example_value"))


def _describe(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        sizes = tuple(map(private.size_name, value.shape))
        strides = tuple(map(private.size_name, value.stride())) if value.layout is torch.strided else None
        return type(value), sizes, strides, value.dtype, value.device, value.requires_grad
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_describe, value))
    if isinstance(value, (int, float, bool, str)):
        return type(value), repr(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value), str(value)
    return type(value).__name__


@dataclass(frozen=True)
class _Closure:
    """A function that was made for one call, with what it holds: Dynamo of torch 2.11 makes one for each call of a
    method of a DTensor, with the placements inside."""

    code: types.CodeType
    held: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash(self.code)


def _operation(module: fx.GraphModule, node: fx.Node) -> tuple[Hashable, ...]:
    """What a node does to what it refers to. Subgraphs that compute the same are the same."""
    target: Hashable = node.target
    if isinstance(target, types.FunctionType) and target.__closure__:
        target = _Closure(target.__code__, tuple(cell.cell_contents for cell in target.__closure__))
    if node.op == "get_attr":
        held = _attribute(module, str(node.target))
        target = structure(held) if isinstance(held, fx.GraphModule) else node.target
    return node.op, target, skeleton(node), described(node)


def structure(module: fx.GraphModule) -> Hashable:
    """What a graph computes, in a form that can be compared."""
    at = {node: i for i, node in enumerate(module.graph.nodes)}
    what = [("input", described(node)) if node.op == "placeholder" else _operation(module, node) for node in at]
    return tuple((each, tuple(at[ref] for ref in references(node))) for each, node in zip(what, at, strict=True))


def _attribute(module: fx.GraphModule, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found
