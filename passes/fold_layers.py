"""Before autograd: of layers that repeat, leave five in the graph; ``unfold_layers`` puts the others back.

Only what is left goes through AOTAutograd, Inductor's joint passes and the partitioner. The first and the last layer
may differ from the others (a first one gets no gradient from before, a last one gets it from the head), and three in
between show what a layer looks like and that it repeats. Inputs of layers that are left out must be sharded parameters:
a program reads these from their buckets, so nothing need be passed for them. Whatever is not certain is not folded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxshard._torch import private
from fxshard.passes.repeats import Member, Repeat, find_repeat

KEPT = 5
"""Two at the beginning and three at the end."""
LEAST = KEPT + 2
"""Fewer layers are not worth it."""


@dataclass(frozen=True)
class Folded:
    """A captured graph with layers left out, and what it takes to put them back."""

    graph: fx.GraphModule
    kept: tuple[int, ...]
    """Positions of the inputs that are left."""
    members: tuple[Member | None, ...]
    """Layer and role of each input of the whole graph."""
    removed: int
    """How many layers were left out."""


def fold_layers(module: fx.GraphModule, kinds: Sequence[Hashable | None]) -> Folded | None:
    """The graph with five of its repeated layers; None if it has not enough of them.

    ``kinds``: of each input that is a sharded parameter, how it is treated; None for other inputs.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    if private.constants(module) or any(_is_symbolic(node) for node in module.graph.nodes):
        return None  # sizes may depend on values inside, too, where no input has an open one
    repeat = find_repeat(module, kinds, LEAST)
    if repeat is None or not _apart(module, repeat):
        return None
    dropped = {node for node, member in repeat.members.items() if 2 <= member[0] < repeat.layers - 3}
    short = _without_layers(module, repeat, dropped)
    if short is None:
        return None
    kept = tuple(i for i, node in enumerate(inputs) if node not in dropped)
    return Folded(short, kept, tuple(repeat.members.get(node) for node in inputs), repeat.layers - KEPT)


def _apart(module: fx.GraphModule, repeat: Repeat) -> bool:
    """Whether layers meet only in what each hands to the next: nothing else reads what a layer computes, or its inputs.

    What is read elsewhere, by the end or by a layer further on, gets gradients from two sides, and in a folded graph
    the layers in between cannot be told from those that were left out.
    """
    at = {node: i for i, node in enumerate(module.graph.nodes)}

    def layer_of(node: fx.Node) -> int:
        return (at[node] - repeat.start) // repeat.period  # negative before the layers, their number or more after them

    inputs = all(layer_of(user) == layer for node, (layer, _) in repeat.members.items() for user in node.users)
    computed = (node for node in at if 0 <= layer_of(node) < repeat.layers - 1)
    return inputs and all(layer_of(user) <= layer_of(node) + 1 for node in computed for user in node.users)


def _is_symbolic(node: fx.Node) -> bool:
    """Whether a value has open sizes, or sizes that were open until a guard closed them."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *(value.stride() if value.layout is torch.strided else ()))
    else:
        sizes = (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _without_layers(module: fx.GraphModule, repeat: Repeat, dropped: set[fx.Node]) -> fx.GraphModule | None:
    """The graph without the layers in the middle; None if something other than the next layer reads one of them."""
    nodes = list(module.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    first = repeat.start + 2 * repeat.period
    last = repeat.start + (repeat.layers - 3) * repeat.period
    moved = (repeat.layers - KEPT) * repeat.period
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(nodes):
        if first <= position < last or node in dropped:
            continue
        copies: dict[fx.Node, fx.Node] = {}
        for ref in node.all_input_nodes:
            left = ref
            if first <= at[ref] < last:
                in_next = last <= position < last + repeat.period and at[ref] >= last - repeat.period
                left = nodes[at[ref] - moved] if in_next else ref
            if left not in env:
                return None
            copies[ref] = env[left]
        env[node] = graph.node_copy(node, copies.__getitem__)
    return private.graph_module(module, graph)
