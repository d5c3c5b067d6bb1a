"""Step, under a memory budget: saved activations of some kinds are on the host from forward to backward.

Requires all other events, next to which the copies stand, so that no stretch of compute is cut further. A value starts
to leave at the first event after it is computed; its memory is given back where the next value of its kind leaves. In
backward it starts to come back where the value of its kind that is read before it is first read. So of each kind one is
on its way while another one is used. Those that backward reads first stay: they would come back at once.

A kind is what one operator makes in one module, in all layers: layers are decided alike.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import fx

from fxshard._torch import private
from fxshard.passes.recompute_saved import maker_of, module_kind
from fxshard.passes.saved_pairs import saved_pairs
from fxshard.planner.cost import node_flops, tensor_bytes
from fxshard.planner.hardware import Hardware
from fxshard.planner.layout import aligned
from fxshard.planner.memory import GRANULE, SlotRange
from fxshard.schedule.activations import ON_HOST, owned_bytes
from fxshard.schedule.aliases import is_constant, is_view, readers, root_of
from fxshard.schedule.events import META, OPS, STREAM, Kind, Phase, event_of, of_many
from fxshard.schedule.graph_summary import unpacks
from fxshard.schedule.offloads import Offloaded

SMALL = 0.01
"""A kind with less than this share of all saved bytes is not worth a decision."""
MOVED_LATER = (Kind.UNSHARD, Kind.RESHARD)
"""Nothing is put next to what may be moved, or removed."""

Graphs = Mapping[Phase, fx.GraphModule]


Names = tuple[tuple[str, int], ...]
"""Under which names forward saves one value, itself or views of it, and which inputs of backward these are."""
Views = list[tuple[fx.Node, fx.Node]]
"""The same as nodes: in forward, and in backward."""


@dataclass(frozen=True)
class SavedKind:
    """Values that one operator makes in a module of each layer, and saves for backward."""

    values: tuple[Names, ...]
    """In the order of forward; those that would stay are among them."""
    offloaded: Offloaded
    flops: int
    """Of the operators that make them."""


def saved_kinds(graphs: Graphs, outputs: int, machine: Hardware) -> list[SavedKind]:
    """What can be offloaded, the dearest to compute again first. ``outputs``: results of forward that are not saved."""
    forward, backward = (graphs[phase].graph for phase in (Phase.FORWARD, Phase.BACKWARD))
    results: Sequence[Any] = forward.output_node().args[0]  # type: ignore[assignment]
    position = {given: i for i, given in enumerate(backward.find_nodes(op="placeholder"))}
    kept = {root_of(node) for node in results[:outputs] if isinstance(node, fx.Node)}
    saved: dict[fx.Node, Views] = {}
    for node, given in saved_pairs(forward, backward, outputs):
        if isinstance(node, fx.Node):
            saved.setdefault(root_of(node), []).append((node, given))
    leave, come = _Places(forward), _Places(backward)
    kinds: dict[tuple[str, str], list[Views]] = {}
    for root, views in saved.items():
        if root not in kept and _can_leave(root, views):
            kinds.setdefault((_name(root), str(root.meta["val"].shape)), []).append(views)
    found: list[SavedKind] = []
    for (name, _), values in kinds.items():
        values.sort(key=lambda views: leave.order[_made_by(views[0][0])])
        trips = _trips(name, values, leave, come)
        sizes = [tensor_bytes(trip.value.meta["val"]) for trip in trips]
        if sum(sizes) > SMALL * sum(map(owned_bytes, saved)):
            offloaded = Offloaded(name, len(trips), sum(sizes), sum(map(machine.host_seconds, sizes)))
            flops = sum(node_flops(maker_of(root_of(trip.value))) for trip in trips)
            names = tuple(tuple((node.name, position[given]) for node, given in views) for views in values)
            found.append(SavedKind(names, offloaded, flops))
    return sorted(found, key=lambda kind: (-kind.flops / kind.offloaded.bytes, kind.offloaded.name))


def offload_saved(graphs: Graphs, chosen: Sequence[SavedKind]) -> dict[Phase, fx.GraphModule]:
    """Copies of the graphs of a step, with the values of some kinds offloaded."""
    copies = {phase: private.copied(module) for phase, module in graphs.items()}
    forward, backward = copies[Phase.FORWARD].graph, copies[Phase.BACKWARD].graph
    named = {node.name: node for node in forward.nodes}
    inputs = backward.find_nodes(op="placeholder")
    leave, come = _Places(forward), _Places(backward)
    trips: list[_Trip] = []
    for kind in chosen:
        values = [[(named[name], inputs[position]) for name, position in names] for names in kind.values]
        trips += _trips(kind.offloaded.name, values, leave, come)
    trips.sort(key=lambda trip: (leave.order[trip.out], leave.order[_made_by(trip.value)]))
    slots: list[SlotRange] = []
    for trip in trips:
        offset = aligned(slots[-1].end, GRANULE) if slots else 0
        slots.append(SlotRange(offset, tensor_bytes(trip.value.meta["val"])))
    _leave(trips, slots)
    _come_back(trips, slots, come)
    for module in copies.values():
        module.graph.lint()
    return copies


def _leave(trips: Sequence[_Trip], slots: Sequence[SlotRange]) -> None:
    copies: dict[fx.Node, fx.Node] = {}
    for number, (trip, slot) in enumerate(zip(trips, slots, strict=True)):
        _follow(trip.value, _made_by(trip.value))
        copied = trip.insert(Kind.OFFLOAD, trip.out, trip.value, number, slot)
        copies |= {node: copied for node, _ in trip.views}
    output = trips[0].value.graph.output_node()
    output.args = fx.map_arg(output.args, lambda node: copies.get(node, node))  # at once: it has thousands
    for node in copies:
        if not node.users:
            node.graph.erase_node(node)
    for number, trip in enumerate(trips):
        trip.insert(Kind.RELEASE, trip.released, trip.value, number)


def _come_back(trips: Sequence[_Trip], slots: Sequence[SlotRange], come: _Places) -> None:
    order = sorted(enumerate(trips), key=lambda each: (come.order[each[1].coming], come.order[each[1].back], each[0]))
    coming: dict[int, fx.Node] = {}
    for number, trip in order:
        coming[number] = trip.insert(Kind.RELOAD, trip.coming, trip.views[0][1], number, slots[number])
    for number, trip in order:
        first = trip.first
        there = trip.insert(Kind.RESTORE, trip.back, coming[number], number)
        for given in (given for _, given in trip.views):
            view = there
            if given is not trip.views[0][1]:
                value = given.meta["val"]
                with first.graph.inserting_before(first):
                    strided = (there, list(value.shape), list(value.stride()), 0)
                    view = first.graph.call_function(torch.ops.aten.as_strided.default, strided)
                view.meta["val"] = value
            given.replace_all_uses_with(view, partial(is_not, coming[number]))
            given.meta[ON_HOST] = True
        # Views of it that stand further up move to where it is read, not to between events: that would be a segment.
        for node in come.sorted(node for node in readers([there]) if node in come.order):
            if is_view(node) and come.order[node] < come.order[first]:
                first.prepend(node)


@dataclass(frozen=True)
class _Trip:
    """A value, and the events next to which its own stand."""

    name: str
    views: Views
    out: fx.Node
    released: fx.Node
    coming: fx.Node
    back: fx.Node
    first: fx.Node
    """What first reads it in backward."""

    @property
    def value(self) -> fx.Node:
        """What is copied. All others are views of the same memory."""
        return self.views[0][0]

    def insert(self, kind: Kind, before: fx.Node, arg: fx.Node, number: int, slot: SlotRange | None = None) -> fx.Node:
        if STREAM[kind] == "compute":  # compute stops there: not before a collective is started
            before = _behind(before)
        value = self.value.meta["val"]
        with before.graph.inserting_before(before):
            node = before.graph.call_function(OPS[kind], (arg,))
        node.meta["val"] = value if kind is not Kind.RELEASE else None
        phase = Phase.FORWARD if kind in (Kind.OFFLOAD, Kind.RELEASE) else Phase.BACKWARD
        about = {"bytes": tensor_bytes(value), "stream": STREAM[kind], "slot": slot, "op": self.name, "number": number}
        node.meta[META] = of_many(kind, phase, value.dtype, self.value.name, **about)
        return node


class _Places:
    """A graph's nodes in order, and the events next to which copies may stand."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = list(graph.nodes)
        self.order = {node: i for i, node in enumerate(self._nodes)}
        self.first = next(node for node in self._nodes if node.op not in ("placeholder", "get_attr"))
        self.last = self._nodes[-1]
        told = [(i, event_of(node)) for i, node in enumerate(self._nodes)]
        self._events = [i for i, event in told if event is not None and event.kind not in MOVED_LATER]

    def after(self, node: fx.Node) -> fx.Node | None:
        """The first event after a node."""
        at = bisect_right(self._events, self.order[node])
        return self._nodes[self._events[at]] if at < len(self._events) else None

    def before(self, node: fx.Node) -> fx.Node:
        """The last event before a node, or the start of the graph."""
        at = bisect_left(self._events, self.order[node])
        return self._nodes[self._events[at - 1]] if at else self.first

    def sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Each once, in order."""
        return sorted({*nodes}, key=self.order.__getitem__)


def _behind(event: fx.Node) -> fx.Node:
    """The first node after an event that is neither an event nor the unpacking of one; any other node as it is."""
    while event_of(event) is not None or unpacks(event):
        event = event.next
    return event


def _trips(name: str, values: Sequence[Views], leave: _Places, come: _Places) -> list[_Trip]:
    """Of one kind: all values but those that backward reads first."""
    outs = [leave.after(_made_by(views[0][0])) for views in values]
    firsts = [min(_read_by(views), key=come.order.__getitem__) for views in values]
    backs = list(map(come.before, firsts))
    leaving = leave.sorted(out for out in outs if out is not None)
    coming = come.sorted(backs)
    found: list[_Trip] = []
    for views, out, back, first in zip(values, outs, backs, firsts, strict=True):
        if out is None or back is coming[0]:
            continue
        after = leaving.index(out) + 1
        released = leaving[after] if after < len(leaving) else leave.last
        found.append(_Trip(name, views, out, released, coming[coming.index(back) - 1], back, first))
    return found


def _name(root: fx.Node) -> str:
    """The module that makes a value, layers counted as ``*``, and the operator."""
    target = private.operator_of(maker_of(root))
    operator = private.operator_name(target) if target is not None else ""
    return f"{module_kind(maker_of(root))} {operator}".strip()


def _can_leave(root: fx.Node, views: Views) -> bool:
    """Whether a saved value is a tensor in memory of its own that forward makes and backward computes with."""
    if root.op != "call_function" or is_constant(root) or not owned_bytes(root):
        return False
    for node, _ in views:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or private.free_symbols(value) or not _is_dense(value):
            return False
        if tensor_bytes(value) != owned_bytes(root) or value.dtype != root.meta["val"].dtype:
            return False
    read_by = _read_by(views)
    return bool(read_by) and all(reader.op != "output" for reader in read_by)


def _read_by(views: Views) -> list[fx.Node]:
    """What computes with it in backward."""
    return [reader for reader in readers(given for _, given in views) if not is_view(reader)]


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor fills its memory, in any order of its dimensions: it is copied as it lies there."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _made_by(node: fx.Node) -> fx.Node:
    """What a view is made of, as far as nothing but views is in between."""
    return root_of(node, event_of)


def _follow(view: fx.Node, source: fx.Node) -> None:
    """Move views to right after what they are made of."""
    if view is not source:
        before = view.all_input_nodes[0]
        _follow(before, source)
        before.append(view)
