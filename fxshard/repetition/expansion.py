"""What was left out of a captured graph, put back into its joint graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxshard import _compat
from fxshard.repetition.numbering import Numbering, rates
from fxshard.repetition.periods import Line, Member, Unrepeatable, described, references, same_operation

KEPT = 4
"""Layers that go through autograd: the first and the last may differ, two in between show the period."""


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

    def expand(self, joint: fx.GraphModule) -> fx.GraphModule:
        """The joint graph of the whole model; raises :class:`Unrepeatable` where that cannot be told from this one."""
        return self._expansion(joint, None).build()

    def numbering(self, joint: fx.GraphModule) -> Numbering:
        """How nodes are named in the joint graph of the whole model."""
        return self._expansion(joint, None).numbering

    def expand_joined(self, joined: fx.GraphModule, backward: fx.Node, numbering: Numbering) -> fx.GraphModule:
        """Like :meth:`expand`, of forward and backward that have been parted and lie behind each other again:
        ``backward`` is the first of its nodes.
        """
        expansion = self._expansion(joined, backward)
        expansion.numbering = numbering
        return expansion.build()

    def _expansion(self, joint: fx.GraphModule, backward: fx.Node | None) -> _Expansion:
        inputs = joint.graph.find_nodes(op="placeholder")
        tangents = inputs[len(self.kept) :]
        if not tangents or any(not node.name.startswith("tangents") for node in tangents):
            raise Unrepeatable
        member: dict[fx.Node, Member | None] = {}
        for node, i in zip(inputs, self.kept, strict=False):
            own = self.members[i]
            member[node] = (own[0] - self.removed, own[1]) if own is not None and own[0] >= 2 else own
        line = Line(joint.graph, member)
        line.boundary = min(line.at[user] for node in tangents for user in node.users)
        if backward is not None:
            line.boundary = line.at[backward]
        return _Expansion(self, joint, line, inputs, tangents)


class _Expansion:
    """Writes the joint graph of the whole model from that of the shortened one.

    ``shift`` says which layer a node stands for: 0 anchors it at the first layers, ``removed`` at the last ones.
    """

    def __init__(
        self, short: Shortened, joint: fx.GraphModule, line: Line, inputs: list[fx.Node], tangents: list[fx.Node]
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
        if not same_forward or not self._backward_repeats():
            raise Unrepeatable
        self.numbering = self._numbering()
        self.graph = fx.Graph()
        self.fixed: dict[fx.Node, fx.Node] = {}
        self.again: dict[tuple[bool, int, int], fx.Node] = {}
        self.params: dict[Member, fx.Node] = {}

    def _backward_repeats(self) -> bool:
        """Whether the last two layers' backward is the same.

        The last layer gets its gradient from the end of the model, where it may stand nearer or be made otherwise than
        between layers (as a sum of two branches). The two layers before show where the others get theirs.
        """
        line, (_, first, second, last) = self.line, self.g
        for offset in range(line.bw_period):
            low, high = line.nodes[second + offset], line.nodes[last + offset]
            if line.alike(low, high):
                continue
            before = line.nodes[min(first + offset, len(line.nodes) - 1)]
            if not line.alike(before, low) or not self._differ_behind(before, low, high):
                return False
        return True

    def _differ_behind(self, before: fx.Node, low: fx.Node, high: fx.Node) -> bool:
        """Whether the last layer's node differs only in what it gets from behind all layers, where the two layers
        before it get theirs from the layer that each of them is followed by.
        """
        if not same_operation(low, high):
            return False
        at = self.line.at
        for earlier, own, last in zip(references(before), references(low), references(high), strict=True):
            if self.line.moves(own, last) is not None:
                continue
            between = self.line.moves(earlier, own) is True and self.g[3] <= at[own] < self.g[2]
            behind = last in self.tangents or self.line.boundary <= at[last] < self.g[3]
            if not between or not behind or described(own.meta.get("val")) != described(last.meta.get("val")):
                return False
        return True

    def _numbering(self) -> Numbering:
        line, f, g = self.line, self.f, self.g
        names = [node.name for node in line.nodes]
        spans = ((f[1], f[2], line.fw_period), (g[3], g[2], line.bw_period))
        forward, backward = (zip(names[low : low + n], names[high : high + n], strict=True) for low, high, n in spans)
        return Numbering(rates(forward, backward), set(names[: line.boundary]), set(names[: f[2]]), self.short.removed)

    def build(self) -> fx.GraphModule:
        line, removed, f, g = self.line, self.short.removed, self.f, self.g
        self._placeholders()
        start, end = len(self.inputs), len(line.nodes) - 1
        self._emit(range(start, f[1]), 0)
        for copy in range(removed + 1):
            self._emit(range(f[1], f[2]), copy, pair=line.fw_period)
        self._emit(range(f[2], f[3]), removed, pair=-line.fw_period)
        self._emit(range(f[3], g[3]), removed)
        self._emit(range(g[3], g[2]), removed, pair=line.bw_period)
        for copy in range(removed, -1, -1):
            self._emit(range(g[2], g[1]), copy, pair=-line.bw_period)
        self._emit(range(g[1], end), 0)
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

    def _emit(self, positions: range, shift: int, pair: int | None = None) -> None:
        """Copy a stretch; ``pair`` is how far the same stretch of the next or previous layer lies behind it."""
        for position in positions:
            node = self.line.nodes[position]
            other = self.line.nodes[position + pair] if pair is not None else None
            copies = iter([self._resolve(ref, twin, shift) for ref, twin in self._pairs(node, other)])
            args, kwargs = _replaced(node, copies)
            name = self.numbering.name(node.name, shift)
            copy = self.graph.create_node(node.op, node.target, args, kwargs, name=name, type_expr=node.type)
            copy.meta.update(node.meta)
            key = self._key(position, shift)
            if key is None:
                self.fixed[node] = copy
            else:
                self.again[key] = copy

    def _pairs(self, node: fx.Node, other: fx.Node | None) -> list[tuple[fx.Node, fx.Node | None]]:
        refs = references(node)
        return list(zip(refs, references(other) if other is not None else [None] * len(refs), strict=True))

    def _resolve(self, ref: fx.Node, twin: fx.Node | None, shift: int) -> fx.Node:
        """What ``ref`` is for a layer moved by ``shift``. ``twin`` is what the next or previous layer has there.

        Outside of layers that repeat there is none, and a parameter is just that one: the end may use the first layer.
        """
        once = ref is twin if twin is not None else not self._in_layers(self.line.at[ref])
        return self._once(ref) if once else self._moved(ref, shift)

    def _in_layers(self, position: int) -> bool:
        return self.f[1] <= position < self.f[3] or self.g[3] <= position < self.g[1]

    def _moved(self, ref: fx.Node, shift: int) -> fx.Node:
        member = self.line.member.get(ref)
        if member is not None:
            return self.params[member[0] + shift, member[1]]
        # What the model is given stands ahead of the layers, and may stand nearer to the second than a period is long.
        key = self._key(self.line.at[ref], shift) if ref.op != "placeholder" else None
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


def _replaced(node: fx.Node, copies: Iterator[fx.Node]) -> Any:
    """A node's arguments with other nodes in the places of :func:`~fxshard.repetition.periods.references`."""
    return fx.map_arg((node.args, node.kwargs), lambda _: next(copies))
