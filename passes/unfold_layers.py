"""After the partitioner: forward and backward of all layers out of those of five.

Requires graphs whose layers were left out by ``fold_layers``. The graphs are put one after the other into one, as
forward and what backward makes of it; the layer in the middle is written as often as layers were left out; the result
is cut where forward ends. The positions of layers are found anew, from the first uses of their parameters, because
autograd and the partitioner have moved nodes. Two layers in the middle must be equal, node by node, in both
directions; otherwise the answer is None, and the whole model is traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from fxshard._torch import private
from fxshard.passes.fold_layers import Folded
from fxshard.passes.join_step import AGAIN, BACKWARD, Parts, cut, join
from fxshard.passes.repeats import Member, described, references, skeleton
from fxshard.schedule.aliases import readers

MIDDLE = 3
"""The last of the layers in the middle; the first is 1."""


def unfold_step(
    folds: Sequence[Folded], forward: fx.GraphModule, backward: fx.GraphModule, outputs: int
) -> Parts | None:
    """Forward and backward of the whole model. ``outputs``: how many results of forward are the model's."""
    whole = _unfold_all(folds, join(forward, backward, outputs))
    return None if whole is None else cut(whole, outputs)


def unfold_evaluation(folds: Sequence[Folded], forward: fx.GraphModule) -> fx.GraphModule | None:
    """The graph of an evaluation of the whole model."""
    return _unfold_all(folds, forward)


def _unfold_all(folds: Sequence[Folded], module: fx.GraphModule | None) -> fx.GraphModule | None:
    for folded in reversed(folds):
        module = _unfold(folded, module) if module is not None else None
    return module


def _unfold(folded: Folded, module: fx.GraphModule) -> fx.GraphModule | None:
    boundary = next((node for node in module.graph.nodes if node.meta.get(BACKWARD)), None)
    inputs = module.graph.find_nodes(op="placeholder")
    tangents = inputs[len(folded.kept) :]
    if any(not node.name.startswith("tangents") for node in tangents):
        return None
    member: dict[fx.Node, Member | None] = {}
    for node, i in zip(inputs, folded.kept, strict=False):
        own = folded.members[i]
        member[node] = (own[0] - folded.removed, own[1]) if own is not None and own[0] >= 2 else own
    line = _Line(module.graph, member, boundary)
    return _Unfolding(folded, module, line, inputs, tangents).build() if line.repeats() else None


class _Line:
    """The nodes of forward, and of backward after it, and where their layers begin."""

    def __init__(self, graph: fx.Graph, member: dict[fx.Node, Member | None], boundary: fx.Node | None) -> None:
        self.nodes = list(graph.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        self.member = member
        self.tangents = {node for node in self.nodes if node.op == "placeholder" and node not in member}
        self.boundary = self.at[boundary] if boundary is not None else len(self.nodes)
        self.has_backward = boundary is not None
        self.forward: list[int] = []
        """Where the layers of forward begin, from the first to the last in the middle."""
        self.backward: list[int] = []
        """Where those of backward begin, by the layer's number: later layers come first. None where they have none."""
        self.fw_period = self.bw_period = 0

    def repeats(self) -> bool:
        """Whether the layers in the middle are equal. Finds where all of them begin."""
        self.forward = self._first_uses(range(MIDDLE + 1))
        if len(self.forward) <= MIDDLE:
            return False
        f = self.forward
        self.fw_period = f[2] - f[1]
        if self.fw_period <= 0 or f[3] - f[2] != self.fw_period:
            return False
        if self.has_backward and not self._find_backward():
            return False
        return (
            self._equal(f[1], f[2], self.fw_period)
            and (not self.backward or self._equal(self.backward[2], self.backward[3], self.bw_period))
            and not self._bridges()
        )

    def _bridges(self) -> bool:
        """Whether backward computes again, in one go, what reaches over the layers that were left out.

        Values that go from layer to layer without a parameter may all be computed again where backward begins. Such a
        chain has as many links as the folded model has layers, and no copy of a stretch makes it longer.
        """
        f, g = self.forward, self.backward
        for position in range(self.boundary, len(self.nodes) - 1):
            again = self.nodes[position].meta.get(AGAIN)
            if again is None:
                continue
            if (not g or position < g[3]) and f[1] <= self.at[again] < f[2]:
                return True
            if g and position >= g[1] and f[2] <= self.at[again] < f[3] and self.before(position) is None:
                return True
        return False

    def _equal(self, low: int, high: int, length: int) -> bool:
        """Whether two stretches are equal; ``low`` is where that of the earlier layer begins."""
        return all(self.alike(self.nodes[low + o], self.nodes[high + o]) for o in range(length))

    def _find_backward(self) -> bool:
        # Nothing may flow through the first layer, as where the model's input is data: it is not asked about.
        found = self._first_uses(range(1, MIDDLE + 1), backward=True)
        if not found:
            return self._ends_behind_layers()
        if len(found) < MIDDLE:
            return False
        g = self.backward = [-1, *found]
        self.bw_period = g[1] - g[2]
        return self.bw_period > 0 and g[2] - g[3] == self.bw_period and g[3] >= self.boundary

    def _ends_behind_layers(self) -> bool:
        """Whether no gradient goes through layers, as where all of them are frozen, and what is before them."""
        results: Any = self.nodes[-1].args[0]
        gradients = zip(self.member, results[-len(self.member) :], strict=True)
        trained = [node for node, gradient in gradients if gradient is not None]
        return all(self.at[user] >= self.forward[MIDDLE] for node in trained for user in node.users)

    def _first_uses(self, layers: Iterable[int], *, backward: bool = False) -> list[int]:
        """Where each layer's parameters, or views of them, are first used in one direction; fewer if some never are."""
        found: dict[int, int] = {}
        for node, member in self.member.items():
            for user in readers([node]) if member is not None else ():
                assert member is not None
                position = self.at[user]
                if (position >= self.boundary) == backward and user.op != "output":
                    found[member[0]] = min(found.get(member[0], position), position)
        return [found[layer] for layer in layers if layer in found]

    def before(self, position: int) -> fx.Node | None:
        """What stands one layer before a position of backward, if it is alike."""
        found = self.nodes[position - self.bw_period]
        return found if self.alike(self.nodes[position], found) else None

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
    same = low.op == high.op and low.target == high.target and skeleton(low) == skeleton(high)
    return same and described(low) == described(high)


class _Unfolding:
    """Writes the graph of the whole model from that of the folded one.

    ``shift`` says which layer a node stands for: 0 anchors it at the first layers, ``removed`` at the last ones.
    """

    def __init__(
        self, folded: Folded, module: fx.GraphModule, line: _Line, inputs: list[fx.Node], tangents: list[fx.Node]
    ) -> None:
        self.folded, self.module, self.line = folded, module, line
        self.inputs, self.tangents = inputs, tangents
        self.graph = fx.Graph()
        self.fixed: dict[fx.Node, fx.Node] = {}
        self.again: dict[tuple[bool, int, int], fx.Node] = {}
        self.params: dict[Member, fx.Node] = {}

    def build(self) -> fx.GraphModule | None:
        self._placeholders()
        if not all(self._emit(positions, shift, pair) for positions, shift, pair in self._stretches()):
            return None
        if not self._output(self.line.nodes[-1]):
            return None
        self.graph.lint()
        return private.graph_module(self.module, self.graph)

    def _stretches(self) -> Iterator[tuple[range, int, int | None]]:
        """Positions to copy, the layer they stand for, and how far the same stretch of a neighbouring layer is."""
        removed, f, g = self.folded.removed, self.line.forward, self.line.backward
        fw, bw, end = self.line.fw_period, self.line.bw_period, len(self.line.nodes) - 1
        yield range(len(self.inputs), f[1]), 0, None
        for copy in range(removed + 1):
            yield range(f[1], f[2]), copy, fw
        yield range(f[2], f[3]), removed, -fw
        if not g:
            yield range(f[3], end), removed, None
            return
        yield range(f[3], g[3]), removed, None
        yield range(g[3], g[2]), removed, bw
        for copy in range(removed, -1, -1):
            yield range(g[2], g[1]), copy, -bw
        yield range(g[1], end), 0, None

    def _placeholders(self) -> None:
        like = {member: node for node, member in self.line.member.items() if member is not None}
        own = dict(zip(self.folded.kept, self.inputs, strict=False))
        for i, member in enumerate(self.folded.members):
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

    def _emit(self, positions: range, shift: int, pair: int | None) -> bool:
        """Copy a stretch; False if something that it refers to cannot be told."""
        for position in positions:
            node = self.line.nodes[position]
            refs = references(node)
            like = self._like(position, pair)
            others = references(like) if like is not None else [None] * len(refs)
            copies = [self._resolve(ref, other, shift) for ref, other in zip(refs, others, strict=True)]
            if any(copy is None for copy in copies):
                return False
            args, kwargs = _replaced(node, iter(copies))  # type: ignore[arg-type]
            copy = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name, type_expr=node.type)
            copy.meta.update(node.meta)
            if (again := node.meta.get(AGAIN)) is not None:
                copy.meta[AGAIN] = self._resolve(again, like.meta.get(AGAIN) if like is not None else None, shift)
                if copy.meta[AGAIN] is None:
                    return False
            key = self._key(position, shift)
            if key is None:
                self.fixed[node] = copy
            else:
                self.again[key] = copy
        return True

    def _like(self, position: int, pair: int | None) -> fx.Node | None:
        """The same node in a neighbouring layer.

        After the layers that repeat, backward goes on with the first ones, and may begin with what it computes again of
        the next one: as far as that is like the stretch before it, it repeats too.
        """
        if pair is not None:
            return self.line.nodes[position + pair]
        if not self.line.backward or position < self.line.backward[1]:
            return None
        return self.line.before(position)

    def _resolve(self, ref: fx.Node, other: fx.Node | None, shift: int) -> fx.Node | None:
        """What ``ref`` is for a layer moved by ``shift``. ``other`` is what the next or previous layer has there.

        Outside of layers that repeat there is none, and a parameter is just that one.
        """
        if other is not None:
            return self.fixed.get(ref) if ref is other else self._moved(ref, shift)
        if self._in_layers(self.line.at[ref]):
            return self._moved(ref, shift) if self._is_next(self.line.at[ref], shift) else None
        return self.fixed.get(ref)

    def _is_next(self, position: int, shift: int) -> bool:
        """Whether a position lies in the stretch next to the layers at one end, which is written there as it is.

        The end of the model may also read the second layer, and backward's end the third from last: one was left out
        between them and the layers that they would be taken for.
        """
        f, g = self.line.forward, self.line.backward
        if position < self.line.boundary:
            return (position >= f[2]) == (shift != 0)
        return (position < g[2]) == (shift != 0)

    def _in_layers(self, position: int) -> bool:
        f, g = self.line.forward, self.line.backward
        return f[1] <= position < f[3] or (bool(g) and g[3] <= position < g[1])

    def _moved(self, ref: fx.Node, shift: int) -> fx.Node | None:
        member = self.line.member.get(ref)
        if member is not None:
            return self.params.get((member[0] + shift, member[1]))
        if ref.op == "placeholder":  # what the model is given
            return self.fixed.get(ref)
        position = self.line.at[ref]
        key = self._key(position, shift)
        if key is not None:
            return self.again.get(key)
        return self.fixed.get(ref) if shift == self._anchor(position) else None

    def _anchor(self, position: int) -> int | None:
        """Which layers a node outside of those that repeat belongs to, as a shift."""
        if self._in_layers(position):
            return None
        f, g = self.line.forward, self.line.backward
        return self.folded.removed if f[3] <= position and not (g and g[1] <= position) else 0

    def _key(self, position: int, shift: int) -> tuple[bool, int, int] | None:
        """Which of the repeated nodes stands for ``position`` when seen from layers moved by ``shift``, if one does."""
        removed, line, f, g = self.folded.removed, self.line, self.line.forward, self.line.backward
        if position < line.boundary:
            period, offset = divmod(position - f[1], line.fw_period)
            inside = f[1] - line.fw_period <= position < f[3] + line.fw_period
            index = period + shift
        elif not g:
            return None
        else:
            period, offset = divmod(position - g[3], line.bw_period)
            inside = g[3] - line.bw_period <= position < g[1] + line.bw_period
            index = period + removed - shift
        if not inside or not 0 <= index < removed + 2:
            return None
        return position >= line.boundary, index, offset

    def _output(self, output: fx.Node) -> bool:
        """Outputs of forward, then (with backward) one gradient per input; False if one cannot be told."""
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        described_as: list[Any] = list(output.meta.get("desc", ()))
        count = len(results) - len(self.folded.kept) if self.line.has_backward else len(results)
        new: list[Any] = [self._given(result) for result in results[:count]]
        if self.line.has_backward:
            new += self._gradients(results[count:])
            described_as = [*described_as[:count], *(described_as[-1:] * len(self.folded.members))]
        if any(each is _UNKNOWN for each in new):
            return False
        node = self.graph.output(tuple(new))
        node.meta.update(output.meta)
        if "desc" in node.meta:  # torch describes each output, and pairs the two lists
            node.meta["desc"] = described_as
        return True

    def _given(self, result: Any) -> Any:
        """A result of the model. Which of the layers that repeat makes one can no longer be told."""
        if not isinstance(result, fx.Node):
            return result
        return _UNKNOWN if self._in_layers(self.line.at[result]) else self.fixed[result]

    def _gradients(self, results: Sequence[Any]) -> Iterator[Any]:
        gradient = dict(zip(self.folded.kept, results, strict=True))
        of_layer = {self.line.member[self.inputs[k]]: result for k, result in enumerate(results)}
        for i, member in enumerate(self.folded.members):
            if i in gradient:
                yield self._gradient_left(gradient[i], member)
                continue
            assert member is not None
            yield self._gradient(member[0], [of_layer[layer, member[1]] for layer in range(1, MIDDLE + 1)])

    def _gradient(self, number: int, like: Sequence[Any]) -> Any:
        """The gradient in a layer that was left out, from those in the middle.

        One may stand in a stretch after its own layer's, where backward computes the layer before again: so that of a
        later layer may be the one that stands among the layers that repeat.
        """
        if like[0] is None and like[1] is None:
            return None
        for layer, low in enumerate(like, start=1):
            high = like[min(layer, MIDDLE - 1)]
            if low is None or high is None or (low is not high and self.line.moves(low, high) is not True):
                break
            found = self._moved(low, number - layer)
            if found is not None:
                return found
        return _UNKNOWN

    def _gradient_left(self, gradient: Any, member: Member | None) -> Any:
        """The gradient of an input that is left. That of a parameter of the last layers stands in its own layer's
        stretch or in the one after it.
        """
        of_the_last = member is not None and member[0] - self.folded.removed >= MIDDLE - 1
        return self._result(gradient, self.folded.removed if of_the_last or self._at_end(gradient) else 0)

    def _at_end(self, gradient: Any) -> bool:
        """Whether a gradient is computed before backward reaches the layers."""
        g = self.line.backward
        return isinstance(gradient, fx.Node) and (not g or self.line.at[gradient] < g[3])

    def _result(self, result: Any, shift: int) -> Any:
        if not isinstance(result, fx.Node):
            return result
        found = self._moved(result, shift)
        return _UNKNOWN if found is None else found


_UNKNOWN = object()


def _replaced(node: fx.Node, copies: Iterator[fx.Node]) -> Any:
    """A node's arguments with other nodes in the places of :func:`~fxshard.passes.repeats.references`."""
    return fx.map_arg((node.args, node.kwargs), lambda _: next(copies))
