"""Memory of a running graph besides buckets: batch, saved values, and temporaries inside stretches of compute.

Counted from shapes and the order of nodes. Operator by operator, a value takes memory when its node runs, and gives it
back after the last node that reads it, or a view of it. Where stretches are compiled, a value that only pointwise nodes
and reductions of its own stretch read is never written: what it is made of lives until those have run. What kernels
take for themselves while they run is not known here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxshard._torch import private
from fxshard.planner.cost import node_flops, tensor_bytes
from fxshard.schedule.aliases import is_constant, is_view, readers, root_of
from fxshard.schedule.events import OF_MODEL, Kind, Phase, event_of
from fxshard.schedule.graph_summary import computes, unpacks
from fxshard.schedule.params import GRADS, PARAM

_FUSED = {
    "_to_copy", "convert_element_type", "sum", "mean", "amax", "amin", "any", "var_mean", "full", "iota", "expand",
    "where", "clone", "gather", "constant_pad_nd", "cat", "split_with_sizes", "slice_scatter", "select_scatter",
}  # fmt: skip
"""Operators that Inductor fuses besides pointwise ones."""


ON_HOST = "fxshard_on_host"
"""Key of ``node.meta``: an input of backward is the host's copy of an activation."""


@dataclass(frozen=True)
class Held:
    """A value that is alive at some node, and its bytes."""

    node: fx.Node
    bytes: int


class Activations:
    """Bytes alive while each node of a graph runs and after it. Parameters and gradients live in buckets.

    ``fused``: stretches are compiled. ``outside``: bytes that live as long as the graph runs. ``memory``: of inputs, by
    name, whose memory they are, where several have the same.
    """

    def __init__(
        self, graph: fx.Graph, fused: bool = False, outside: int = 0, memory: Mapping[str, str] | None = None
    ) -> None:
        self.nodes = list(graph.nodes)
        self._at = {node: i for i, node in enumerate(self.nodes)}
        self._stretch = _stretches(self.nodes)
        views = {node for node in self.nodes if is_view(node)}
        self._fused = {node for node in self.nodes if computes(node) and _fuses(node)} if fused else set()
        self._inlined = _inlined(self._fused, views, self._stretch)
        self.root: dict[fx.Node, fx.Node] = {}
        first: dict[str, fx.Node] = {}
        for node in self.nodes:
            self.root[node] = self.root[node.all_input_nodes[0]] if node in views else node
            if memory and node.op == "placeholder" and node.name in memory:
                self.root[node] = first.setdefault(memory[node.name], node)
        # Parameters' gradients go to their buckets, whether the nodes that write them there are inserted yet or not.
        given: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        refs = graph.output_node().meta.get(GRADS, ())
        gradients = [node for node, ref in zip(given, refs, strict=False) if ref is not None and node is not None]
        self._in_buckets = {self.root[node] for node in gradients}
        self._end = self._last_reads()
        self._owned: dict[fx.Node, int] = {}
        self.after: dict[fx.Node, int] = {}
        self.during: dict[fx.Node, int] = {}
        self._count(outside)

    def _last_reads(self) -> dict[fx.Node, int]:
        """{value: the position of the last node that needs it}; reading a view keeps what it is a view of.

        A collective of the model's own reads until it is waited for.
        """
        end: dict[fx.Node, int] = {}
        for i in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[i]
            runs = end.get(node, i) if node in self._inlined else i
            if private.collective_name(node) is not None:
                runs = max([i, *(self._at[user] for user in node.users if private.is_wait(user))])
            for arg in node.all_input_nodes:
                source = self.root[arg]
                end[source] = max(end.get(source, -1), runs)
        return end

    @cached_property
    def _dies(self) -> dict[int, list[fx.Node]]:
        found: dict[int, list[fx.Node]] = {}
        for node, at in self._end.items():
            if self.nodes[at].op != "output":
                found.setdefault(at, []).append(node)
        return found

    def _count(self, alive: int) -> None:
        stretch = self._stretch
        for i, node in enumerate(self.nodes):
            own = self.owned(node)
            made = own or _parts_bytes(node)
            dead = self._dies.get(i, ())
            freed = sum(self.owned(each) for each in dead)
            # A compiled pointwise node writes over what dies in it, if that is its stretch's own.
            reused = 0
            if node in self._fused:
                here = [each for each in dead if stretch[each] == stretch[node] and each.op != "placeholder"]
                reused = sum(map(self.owned, here))
            self.during[node] = alive + max(0, made - reused)
            alive += (own if node in self._end else 0) - freed  # what no node reads is gone at once
            self.after[node] = alive

    def owned(self, node: fx.Node) -> int:
        """Bytes that a node's value adds to what is held."""
        if node not in self._owned:
            owns_none = node in self._inlined or node in self._in_buckets or self.root[node] is not node
            self._owned[node] = 0 if owns_none else owned_bytes(node)
        return self._owned[node]

    def peak(self, nodes: list[fx.Node]) -> int:
        return max(self.during[node] for node in nodes)

    def alive_at(self, node: fx.Node) -> Iterator[Held]:
        """The values that :attr:`during` counts at a node."""
        here = self._at[node]
        for each, at in self._end.items():
            if self._at[each] <= here <= at and self.owned(each):
                yield Held(each, self.owned(each))


def step_activations(modules: Mapping[Phase, fx.GraphModule], fused: bool) -> dict[Phase, Activations]:
    """For the graphs of a step: during backward the caller still has what forward returned to it."""
    graphs = {phase: module.graph for phase, module in modules.items()}
    forward, backward = graphs.get(Phase.FORWARD), graphs.get(Phase.BACKWARD)
    outside, memory = 0, dict[str, str]()
    if forward is not None and backward is not None:
        taken = {node.name for node in backward.find_nodes(op="placeholder")}
        results = {node: root_of(node) for node in forward.output_node().all_input_nodes}
        memory = {node.name: owner.name for node, owner in results.items() if node.name in taken}
        only_returned = {owner for node, owner in results.items() if owner.name not in memory.values()}
        outside = sum(owned_bytes(node) for node in only_returned if node.op != "placeholder")
    return {
        phase: Activations(graph, fused, *((outside, memory) if phase is Phase.BACKWARD else ()))
        for phase, graph in graphs.items()
    }


def peak_bytes(held: Mapping[Phase, Activations]) -> int:
    """The most that the graphs of a step hold at any node."""
    return max((max(each.during.values(), default=0) for each in held.values()), default=0)


def owned_bytes(node: fx.Node) -> int:
    """Bytes of the memory that a node's value has to itself."""
    event = event_of(node)
    owns_none = unpacks(node) or node.meta.get(PARAM) is not None or ON_HOST in node.meta
    if event is not None:
        owns_none = event.kind not in (*OF_MODEL, Kind.RELOAD)
    value = node.meta.get("val")
    if owns_none or is_view(node) or node.target is torch.ops.aten.copy_.default or not isinstance(value, torch.Tensor):
        return 0
    if is_constant(node) and all(reader.op != "output" for reader in readers([node])):  # made again where it is used
        return 0
    return tensor_bytes(value)


def _parts_bytes(node: fx.Node) -> int:
    """Bytes of an operator that gives several tensors: the nodes that unpack it have them later."""
    value = node.meta.get("val")
    several = isinstance(value, (tuple, list)) and computes(node) and not is_view(node)
    return tensor_bytes(value) if several else 0


def _stretches(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    """In which stretch each node is. Gathers and releases do not count: which are there is decided later."""
    found: dict[fx.Node, int] = {}
    number = 0
    for node in nodes:
        event = event_of(node)
        number += event is not None and event.kind not in (Kind.UNSHARD, Kind.RESHARD)
        found[node] = number
    return found


def _inlined(fused: set[fx.Node], views: set[fx.Node], stretch: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Values that a compiler never writes: all that read them are fused into the same kernels."""
    found: set[fx.Node] = set()
    for node in fused - views:
        read_by = [reader for reader in readers([node]) if reader not in views]
        if read_by and all(reader in fused and stretch[reader] == stretch[node] for reader in read_by):
            found.add(node)
    return found


def _fuses(node: fx.Node) -> bool:
    target = private.operator_of(node)
    return target is not None and not node_flops(node) and _is_fused(target)


@functools.cache
def _is_fused(target: torch._ops.OpOverload) -> bool:
    if private.is_mutable(target):
        return False
    return torch.Tag.pointwise in target.tags or private.operator_name(target) in _FUSED
