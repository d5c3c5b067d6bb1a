"""Planning a deep model without tracing every layer through autograd.

What a step does to the layers of one ``ModuleList`` repeats. Dynamo captures the model whole; where its graph repeats,
node by node, :func:`shorten` leaves four of the layers, only these go through AOTAutograd and Inductor's joint passes,
and :meth:`Shortened.expand` puts the others back into the joint graph. The partitioner and fxshard's own passes then
work on the whole graph. Wherever something does not repeat exactly the answer is None, and planning traces
everything.

A *period* is a stretch of nodes from the first use of one layer's parameters to the first use of the next one's. Where
it is cut does not matter, as long as two of them are equal but for their references: to the same node outside, or to
nodes and parameters that lie one period apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from fxshard import _compat
from fxshard.passes.aliases import readers

KEPT = 4
"""Layers that go through autograd: the first and the last may differ, two in between show the period."""

Member = tuple[int, str]
"""(layer, the rest of the name) of a parameter or buffer that belongs to a repeated layer."""


class Unrepeatable(BaseException):
    """The joint graph of a shortened model does not repeat: trace all of it. Not an error, so nothing wraps it."""


def shorten(module: fx.GraphModule, names: Sequence[str | None]) -> Shortened | None:
    """The captured graph with four of its repeated layers; ``names`` are those of its inputs, None for data."""
    inputs = module.graph.find_nodes(op="placeholder")
    members = _members(names)
    layers = 1 + max((member[0] for member in members if member is not None), default=-1)
    line = _Line(module.graph, dict(zip(inputs, members, strict=True)))
    first = line.first_uses(range(layers))
    if layers < KEPT + 2 or first is None or not _repeats(line, first):
        return None
    removed = range(first[2], first[layers - 2])
    dropped = {node for node, member in line.member.items() if member and 2 <= member[0] < layers - 2}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(line.nodes):
        if position in removed or node in dropped:
            continue
        copies: dict[fx.Node, fx.Node] = {}
        for ref in node.all_input_nodes:
            left = _left_for(ref, line, first) if position >= removed.stop else ref
            if left is None:
                return None
            copies[ref] = env[left]
        env[node] = graph.node_copy(node, copies.__getitem__)
    kept = tuple(i for i, node in enumerate(inputs) if node not in dropped)
    short = _compat.graph_module(module, graph)
    return Shortened(short, kept, tuple(members), layers - KEPT, range(first[0], first[-1]))


def _left_for(ref: fx.Node, line: _Line, first: list[int]) -> fx.Node | None:
    """What the end of the graph refers to once layers are gone; None if it reaches back by more than one layer."""
    layers, position = len(first), line.at[ref]
    member = line.member.get(ref)
    if member is not None:
        return ref if member[0] in (0, layers - 2, layers - 1) else None
    if ref.op == "placeholder" or position < first[1] or position >= first[layers - 2]:
        return ref
    if position < first[layers - 3]:
        return None
    return line.nodes[position - (layers - KEPT) * line.fw_period]


def _members(names: Sequence[str | None]) -> list[Member | None]:
    """Which inputs belong to which layer of the list that has most of them."""
    found = [re.fullmatch(r"(.*?)\b(\d+)\.(.*)", name) if name is not None else None for name in names]
    layers: dict[str, set[int]] = {}
    for match in found:
        if match is not None:
            layers.setdefault(match[1], set()).add(int(match[2]))
    if not layers:
        return [None] * len(names)
    longest = max(layers, key=lambda prefix: len(layers[prefix]))
    start = min(layers[longest])
    return [(int(match[2]) - start, match[3]) if match is not None and match[1] == longest else None for match in found]


def _repeats(line: _Line, first: list[int]) -> bool:
    """Whether all layers but the first and the last are the same, in parameters and in what is done with them."""
    layers = len(first)
    shapes: list[dict[str, Any]] = [{} for _ in range(layers)]
    for node, member in line.member.items():
        if member is not None:
            value = node.meta.get("example_value")
            described = (value.shape, value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else None
            shapes[member[0]][member[1]] = described
    if any(list(a.items()) != list(b.items()) or None in a.values() for a, b in pairwise(shapes[1:-1])):
        return False
    line.fw_period = first[2] - first[1]
    if any(b - a != line.fw_period for a, b in pairwise(first[1:])):
        return False
    return all(line.equal(a, b, line.fw_period) for a, b in pairwise(first[1:-1]))


class _Line:
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
        return all(self._alike(self.nodes[start + o], self.nodes[other + o]) for o in range(length))

    def _alike(self, low: fx.Node, high: fx.Node) -> bool:
        if low.op != high.op or low.target != high.target or _skeleton(low) != _skeleton(high):
            return False
        if _described(low.meta.get("val")) != _described(high.meta.get("val")):
            return False
        return all(self.moves(a, b) is not None for a, b in zip(_refs(low), _refs(high), strict=True))

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


@dataclass(frozen=True)
class Shortened:
    """A captured graph with layers left out, and what it takes to put them back into its joint graph."""

    graph: fx.GraphModule
    kept: tuple[int, ...]
    """Positions of the inputs that are left."""
    members: tuple[Member | None, ...]
    """The layer of each input of the whole graph."""
    removed: int
    """How many layers were left out."""
    gap: range
    """Where the layers stand in the captured graph, all but the last."""

    def expand(self, joint: fx.GraphModule) -> fx.GraphModule:
        """The joint graph of the whole model; raises :class:`Unrepeatable` where that cannot be told from this one."""
        inputs = joint.graph.find_nodes(op="placeholder")
        tangents = inputs[len(self.kept) :]
        if not tangents or any(not node.name.startswith("tangents") for node in tangents):
            raise Unrepeatable
        member: dict[fx.Node, Member | None] = {}
        for node, i in zip(inputs, self.kept, strict=False):
            own = self.members[i]
            member[node] = (own[0] - self.removed, own[1]) if own is not None and own[0] >= 2 else own
        line = _Line(joint.graph, member)
        line.boundary = min(line.at[user] for node in tangents for user in node.users)
        return _Expansion(self, joint, line, inputs, tangents).build()


class _Expansion:
    """Writes the joint graph of the whole model from that of the shortened one.

    ``shift`` says which layer a node stands for: 0 anchors it at the first layers, ``removed`` at the last ones.
    """

    def __init__(
        self, short: Shortened, joint: fx.GraphModule, line: _Line, inputs: list[fx.Node], tangents: list[fx.Node]
    ) -> None:
        self.short, self.joint, self.line = short, joint, line
        self.inputs, self.tangents = inputs, tangents
        forward = line.first_uses(range(KEPT))
        backward = line.first_uses(range(1, KEPT), backward=True)
        if forward is None or backward is None:
            raise Unrepeatable
        backward.insert(0, -1)  # nothing may flow through the first layer, as where the model's input is data
        self.f, self.g = forward, backward
        line.fw_period, line.bw_period = forward[2] - forward[1], backward[1] - backward[2]
        if forward[3] - forward[2] != line.fw_period or backward[2] - backward[3] != line.bw_period:
            raise Unrepeatable
        if line.fw_period <= 0 or line.bw_period <= 0 or backward[3] < forward[3]:
            raise Unrepeatable
        same_forward = line.equal(self.f[1], self.f[2], line.fw_period)
        if not same_forward or not line.equal(self.g[2], self.g[3], line.bw_period):
            raise Unrepeatable
        self.rates = self._rates()
        self.graph = fx.Graph()
        self.fixed: dict[fx.Node, fx.Node] = {}
        self.again: dict[tuple[bool, int, int], fx.Node] = {}
        self.params: dict[Member, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        line, removed, f, g = self.line, self.short.removed, self.f, self.g
        self._placeholders()
        start, end = len(self.inputs), len(line.nodes) - 1
        self._emit(range(start, f[1]), 0, (0, 0))
        self._emit(range(f[1], f[2]), 0, (0, 0), pair=line.fw_period)
        for copy in range(1, removed + 1):
            self._emit(range(f[1], f[2]), copy, (copy, 0), pair=line.fw_period)
        self._emit(range(f[2], f[3]), removed, (removed, 0), pair=-line.fw_period)
        self._emit(range(f[3], g[3]), removed, (removed, 0))
        self._emit(range(g[3], g[2]), removed, (removed, 0), pair=line.bw_period)
        for copy in range(removed, 0, -1):
            self._emit(range(g[2], g[1]), copy, (removed, removed - copy), pair=-line.bw_period)
        self._emit(range(g[2], g[1]), 0, (removed, removed), pair=-line.bw_period)
        self._emit(range(g[1], end), 0, (removed, removed))
        self._output(line.nodes[end])
        self.graph.lint()
        return _compat.graph_module(self.joint, self.graph)

    def _placeholders(self) -> None:
        like = {member: node for node, member in self.line.member.items() if member is not None}
        own = dict(zip(self.short.kept, self.inputs, strict=False))
        for i, member in enumerate(self.short.members):
            source = own.get(i)
            if source is None:
                assert member is not None
                source = like[1, member[1]]
            node = self.graph.create_node("placeholder", f"primals_{i + 1}", name=f"primals_{i + 1}")
            node.meta.update(source.meta)
            if member is not None:
                self.params[member] = node
            if i in own:
                self.fixed[source] = node
        for source in self.tangents:
            self.fixed[source] = self.graph.node_copy(source)

    def _emit(self, positions: range, shift: int, numbers: tuple[int, int], pair: int | None = None) -> None:
        """Copy a stretch; ``pair`` is how far the same stretch of the next or previous layer lies behind it."""
        for position in positions:
            node = self.line.nodes[position]
            other = self.line.nodes[position + pair] if pair is not None else None
            copies = iter([self._resolve(ref, twin, shift) for ref, twin in self._pairs(node, other)])
            args, kwargs = _replaced(node, copies)
            name = self._name(node.name, numbers)
            copy = self.graph.create_node(node.op, node.target, args, kwargs, name=name, type_expr=node.type)
            copy.meta.update(node.meta)
            key = self._key(position, shift)
            if key is None:
                self.fixed[node] = copy
            else:
                self.again[key] = copy

    def _pairs(self, node: fx.Node, other: fx.Node | None) -> list[tuple[fx.Node, fx.Node | None]]:
        refs = _refs(node)
        return list(zip(refs, _refs(other) if other is not None else [None] * len(refs), strict=True))

    def _resolve(self, ref: fx.Node, twin: fx.Node | None, shift: int) -> fx.Node:
        """What ``ref`` is for a layer moved by ``shift``. ``twin`` is what the next or previous layer has there."""
        layered = self._in_layers(self.line.at[ref]) or self.line.member.get(ref) is not None
        return self._once(ref) if ref is twin or (twin is None and not layered) else self._moved(ref, shift)

    def _in_layers(self, position: int) -> bool:
        return self.f[1] <= position < self.f[3] or self.g[3] <= position < self.g[1]

    def _moved(self, ref: fx.Node, shift: int) -> fx.Node:
        member = self.line.member.get(ref)
        if member is not None:
            return self.params[member[0] + shift, member[1]]
        key = self._key(self.line.at[ref], shift)
        if key is None:
            return self._once(ref)
        if key not in self.again:
            raise Unrepeatable
        return self.again[key]

    def _once(self, ref: fx.Node) -> fx.Node:
        """A node that the whole model has once, too; one inside a layer that others refer to is none."""
        if ref not in self.fixed:
            raise Unrepeatable
        return self.fixed[ref]

    def _key(self, position: int, shift: int) -> tuple[bool, int, int] | None:
        """Which of the repeated nodes stands for ``position`` when seen from layers moved by ``shift``, if one does."""
        removed, line = self.short.removed, self.line
        if position < line.boundary:
            period, offset = divmod(position - self.f[1], line.fw_period)
            inside = self.f[1] - line.fw_period <= position < self.f[3] + line.fw_period
            index = period + shift
        else:
            period, offset = divmod(position - self.g[3], line.bw_period)
            inside = self.g[3] - line.bw_period <= position < self.g[1] + line.bw_period
            index = period + removed - shift
        if not inside or not 0 <= index < removed + 2:
            return None
        return position >= line.boundary, index, offset

    def _output(self, output: fx.Node) -> None:
        """Outputs of forward, then one gradient per input."""
        results = list(output.args[0])  # type: ignore[arg-type]
        count = len(results) - len(self.short.kept)
        gradient = dict(zip(self.short.kept, results[count:], strict=True))
        of_layer = {self.line.member[self.inputs[k]]: results[count + k] for k in range(len(self.short.kept))}
        new: list[Any] = [self._gradient(result, self.short.removed) for result in results[:count]]
        for i, member in enumerate(self.short.members):
            if i in gradient:
                late = member is not None and member[0] >= self.short.removed + 2
                shift = self.short.removed if late or self._at_the_end(gradient[i]) else 0
                new.append(self._gradient(gradient[i], shift))
            else:
                assert member is not None
                low, high = of_layer[1, member[1]], of_layer[2, member[1]]
                alike = (low is None and high is None) or (low is not None and self.line.moves(low, high))
                if not alike:
                    raise Unrepeatable
                new.append(self._gradient(low, member[0] - 1))
        node = self.graph.output(tuple(new))
        node.meta.update(output.meta)
        if "desc" in node.meta:  # torch describes each output, and the partitioner pairs the two lists
            described = node.meta["desc"]
            node.meta["desc"] = [*described[:count], *([described[-1]] * len(self.short.members))]

    def _at_the_end(self, gradient: Any) -> bool:
        """Whether a gradient is computed before backward reaches the layers."""
        return isinstance(gradient, fx.Node) and self.line.at[gradient] < self.g[3]

    def _gradient(self, result: Any, shift: int) -> Any:
        return self._moved(result, shift) if isinstance(result, fx.Node) else result

    # -- names: those that tracing the whole model would give, so that a plan reads like the run ----------------------

    def _rates(self) -> dict[str, tuple[int, int]]:
        """{stem: by how much its number grows with each layer in forward and in backward}"""
        rates: dict[str, tuple[int, int]] = {}
        spans = ((self.f[1], self.f[2], self.line.fw_period), (self.g[3], self.g[2], self.line.bw_period))
        for direction, (low, high, period) in enumerate(spans):
            for offset in range(period):
                stem, number = _numbered(self.line.nodes[low + offset].name)
                grown = _numbered(self.line.nodes[high + offset].name)[1] - number
                forward, backward = rates.get(stem, (0, 0))
                rates[stem] = (grown, backward) if direction == 0 else (forward, grown)
        if any(forward * backward < 0 for forward, backward in rates.values()):
            raise Unrepeatable
        return rates

    def _name(self, name: str, layers: tuple[int, int]) -> str:
        """Numbers count the nodes of one stem in the order in which they were made: those before this one, or those
        behind it where a pass worked from the end of the graph to its beginning."""
        stem, number = _numbered(name)
        for grown, before in zip(self.rates.get(stem, (0, 0)), layers, strict=True):
            number += grown * before if grown > 0 else -grown * (self.short.removed - before)
        return f"{stem}_{number}" if number else stem


def _numbered(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.*)_(\d+)", name)
    return (match[1], int(match[2])) if match is not None else (name, 0)


def _refs(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, in order, each as often as it is there."""
    refs: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), refs.append)  # type: ignore[arg-type]
    return refs


def _replaced(node: fx.Node, copies: Iterator[fx.Node]) -> Any:
    """A node's arguments with other nodes in the places of :func:`_refs`."""
    return fx.map_arg((node.args, node.kwargs), lambda _: next(copies))


def _skeleton(node: fx.Node) -> str:
    """A node's arguments without the nodes among them."""
    return str(fx.map_arg((node.args, node.kwargs), lambda _: None))  # type: ignore[arg-type, return-value]


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(_described(item) for item in value)
    return value if isinstance(value, (int, float, bool, str)) else type(value)
