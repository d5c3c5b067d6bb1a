"""Forward and backward of a step as one graph, and cut into two again where forward ends.

Nodes carry marks meanwhile, so that what is cut has the order that it had.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fxshard._torch import private
from fxshard.passes.saved_pairs import saved_pairs
from fxshard.schedule.params import PARAM

BACKWARD = "fxshard_backward"
"""Marks the nodes of backward while they stand in one graph with those of forward."""
SHARED = "fxshard_shared"
"""Marks what layers of backward share."""
AGAIN = "fxshard_again"
"""Of what backward computes again: the node of forward that it is."""

Parts = tuple[fx.GraphModule, fx.GraphModule]


def join(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> fx.GraphModule | None:
    """One graph of both."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    taken = backward.graph.find_nodes(op="placeholder")
    results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    saved = {inside: outside for outside, inside in saved_pairs(forward.graph, backward.graph, outputs)}
    if not all(isinstance(outside, fx.Node) for outside in saved.values()):
        return None
    for node in [*forward.graph.find_nodes(op="placeholder"), *taken[len(saved) :]]:
        env[node] = graph.node_copy(node)
    for node in _computing(forward.graph):
        env[node] = graph.node_copy(node, env.__getitem__)
    named = {node.name: node for node in env}  # both were cut from one graph: equal names are mostly equal nodes
    env.update({inside: env[outside] for inside, outside in saved.items()})
    # What layers share stands in the last of them, where backward needs it first.
    shared = _shared(forward.graph, backward.graph, saved)
    own = sorted(_computing(backward.graph), key=lambda node: node not in shared)
    if not own:
        return None
    for node in own:
        env[node] = graph.node_copy(node, env.__getitem__)
        earlier = named.get(node.name)
        env[node].meta[AGAIN] = env[earlier] if earlier is not None and _is_again(earlier, node) else None
        env[node].meta[BACKWARD] = True
        env[node].meta[SHARED] = node in shared
    gradients = fx.map_arg(backward.graph.output_node().args[0], env.__getitem__)
    end = graph.output((*fx.map_arg(results[:outputs], env.__getitem__), *gradients))  # type: ignore[misc]
    described_as: list[Any] = [module.graph.output_node().meta.get("desc") for module in (forward, backward)]
    if None not in described_as:  # not where layers are checkpointed
        end.meta["desc"] = [*described_as[0][:outputs], *described_as[1]]
    return private.graph_module(forward, graph)


def _is_again(earlier: fx.Node, node: fx.Node) -> bool:
    """Whether what has the same name in forward is what backward computes.

    Not so elements of results that torch unpacks after the cut, as it does around operators that may draw random
    numbers in checkpointed layers: they are numbered in each graph by itself.
    """
    if earlier.target != node.target:
        return False
    sources = zip(earlier.all_input_nodes, node.all_input_nodes, strict=False)
    return node.target is not operator.getitem or all(old.target == new.target for old, new in sources)


def _shared(forward: fx.Graph, backward: fx.Graph, saved: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """What backward computes from data and constants alone, for several users: masks, positions, zeros."""
    own = {node for node in forward.find_nodes(op="placeholder") if node.meta.get(PARAM) is not None}
    for node in _computing(forward):
        if any(source in own for source in node.all_input_nodes):
            own.add(node)
    own.update(node for node in backward.find_nodes(op="placeholder") if saved.get(node, node) in {*own, node})
    shared: set[fx.Node] = set()
    for node in _computing(backward):
        if any(source in own for source in node.all_input_nodes):
            own.add(node)
    for node in reversed(_computing(backward)):
        if node not in own and (len(node.users) > 1 or any(user in shared for user in node.users)):
            shared.add(node)
    return shared


def _computing(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def cut(whole: fx.GraphModule, outputs: int) -> Parts:
    """Forward and backward. Forward returns what backward takes, in the order in which it is computed."""
    nodes = list(whole.graph.nodes)
    results: list[Any] = list(whole.graph.output_node().args[0])  # type: ignore[arg-type]
    tangents = [node for node in nodes if node.op == "placeholder" and node.name.startswith("tangents")]
    backward = {node for node in nodes if node.meta.get(BACKWARD)}
    read = {ref for node in backward for ref in node.all_input_nodes}
    read.update(node for node in results[outputs:] if isinstance(node, fx.Node))
    saved = [node for node in nodes if node in read and node not in backward and node not in tangents]
    saved = [*_unread_sizes(nodes, saved), *saved]
    saved.sort(key=lambda node: (private.is_size(node), bool(node.meta.get("saved_tensor_with_no_vc_check"))))
    sizes = [node for node in saved if private.is_size(node)]
    taken = [*sizes, *saved[: len(saved) - len(sizes)], *tangents]
    primals = [node for node in nodes if node.op == "placeholder" and node not in tangents]
    computed = [node for node in nodes if node.op not in ("placeholder", "output")]
    described_as = whole.graph.output_node().meta.get("desc")
    kept = [*described_as[:outputs], *private.saved_outputs(saved)] if described_as else None
    gradients = described_as[outputs:] if described_as else None
    before = [node for node in computed if node not in backward]
    after = [node for node in computed if node in backward]
    return (
        _part(whole, primals, before, [*results[:outputs], *saved], kept),
        _part(whole, taken, _late(after), results[outputs:], gradients),
    )


def _unread_sizes(nodes: Sequence[fx.Node], saved: Sequence[fx.Node]) -> list[fx.Node]:
    """Inputs that are sizes of what is saved, though nothing in backward reads them: a compiler asks for each."""
    sizes = [node for node in nodes if node.op == "placeholder" and private.is_size(node)]
    if not sizes:
        return []
    used = set().union(*(private.free_symbols(node.meta.get("val")) for node in saved))
    return [node for node in sizes if node not in saved and private.free_symbols(node.meta["val"]) & used]


def _late(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes in their order, but what layers share where it is used first."""
    late = {node for node in nodes if node.meta.get(SHARED)}
    ordered: dict[fx.Node, None] = {}

    def place(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in late and source not in ordered:
                place(source)
        ordered[node] = None

    for node in nodes:
        if node not in late:
            place(node)
    return [*ordered, *(node for node in nodes if node not in ordered)]


def _part(
    whole: fx.GraphModule,
    inputs: Sequence[fx.Node],
    inside: Sequence[fx.Node],
    results: Sequence[Any],
    described_as: Sequence[Any] | None,
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.create_node("placeholder", node.name, name=node.name)
        env[node].meta.update(node.meta)
    for node in inside:
        env[node] = _copy(graph, node, env)
    end = graph.output(tuple(fx.map_arg(list(results), env.__getitem__)))
    if described_as is not None:
        end.meta["desc"] = list(described_as)
    return private.graph_module(whole, graph)


def _copy(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, env.__getitem__)
    for mark in (BACKWARD, SHARED, AGAIN):
        copy.meta.pop(mark, None)
    return copy
