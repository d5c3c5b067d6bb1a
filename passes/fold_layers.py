"""Before autograd: of layers that repeat, leave five in the graph; ``unfold_layers`` puts the others back.

Only what is left goes through AOTAutograd, Inductor's joint passes and the partitioner. The first and the last layer
may differ from the others (a first one gets no gradient from before, a last one gets it from the head), and three in
between show what a layer looks like and that it repeats. Inputs of layers that are left out must be sharded parameters:
a program reads these from their buckets, so nothing need be passed for them. Whatever is not certain is not folded.
A model may have several stacks of layers: an encoder and a decoder, a vision tower and a language model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import fx

from fxshard._torch import private
from fxshard.passes.repeats import Member, Repeat, find_repeat

KEPT = 5
"""Two at the beginning and three at the end; there four where layers share a trained value: its gradient is a sum that
begins in the last two, and one layer more shows how it goes on."""
LESS = 2
"""To leave out fewer layers is not worth it."""
LEFT = "fxshard_left"
"""Marks the nodes of layers that are left of a stack."""


_T = TypeVar("_T")


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


def fold_stacks(module: fx.GraphModule, kinds: Sequence[Hashable | None]) -> tuple[Folded, ...]:
    """Every stack of layers folded, the largest first, each in the graph that the one before it left.

    ``kinds``: of each input that is a sharded parameter, how it is treated; None for other inputs.
    """
    folds: list[Folded] = []
    while (found := fold_layers(module, kinds)) is not None:
        folds.append(found)
        module, kinds = found.graph, [kinds[i] for i in found.kept]
    return tuple(folds)


def kept_of(folds: Sequence[Folded], inputs: Sequence[_T]) -> list[_T]:
    """Of the inputs of the whole graph, those of the folded one."""
    kept = list(inputs)
    for folded in folds:
        kept = [kept[i] for i in folded.kept]
    return kept


def fold_layers(module: fx.GraphModule, kinds: Sequence[Hashable | None]) -> Folded | None:
    """The graph with some of the repeated layers of its largest stack; None if no stack has enough of them."""
    inputs = module.graph.find_nodes(op="placeholder")
    if private.constants(module):
        return None
    left = {node for node in module.graph.nodes if LEFT in node.meta}
    repeat = find_repeat(module, kinds, KEPT + LESS, left)
    if repeat is None or not _apart(module, repeat):
        return None
    removed = repeat.layers - KEPT - _share_a_trained_value(module, repeat)
    if removed < LESS:
        return None
    dropped = {node for node, member in repeat.members.items() if 2 <= member[0] < 2 + removed}
    short = _without_layers(module, repeat, removed, dropped)
    if short is None:
        return None
    kept = tuple(i for i, node in enumerate(inputs) if node not in dropped)
    return Folded(short, kept, tuple(repeat.members.get(node) for node in inputs), removed)


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


def _share_a_trained_value(module: fx.GraphModule, repeat: Repeat) -> bool:
    """Whether layers read something besides what each hands to the next that gets a gradient from all of them."""
    at = {node: i for i, node in enumerate(module.graph.nodes)}
    outside = (node for node in module.graph.nodes if at[node] < repeat.start and node not in repeat.members)
    return any(
        getattr(node.meta.get("example_value"), "requires_grad", False)
        and len({(at[user] - repeat.start) // repeat.period for user in node.users}) >= repeat.layers - 1
        for node in outside
    )


def _without_layers(
    module: fx.GraphModule, repeat: Repeat, removed: int, dropped: set[fx.Node]
) -> fx.GraphModule | None:
    """The graph without the layers in the middle; None if something other than the next layer reads one of them."""
    nodes = list(module.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    first = repeat.start + 2 * repeat.period
    moved = removed * repeat.period
    last = first + moved
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
        if repeat.start <= position < repeat.start + repeat.layers * repeat.period:
            env[node].meta[LEFT] = True
    return private.graph_module(module, graph)
