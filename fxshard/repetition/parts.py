"""Forward and backward of a model from those of four of its layers.

The partitioner takes a joint graph and says what forward saves for backward; it is asked about four layers. What it
makes of them is one graph again for as long as the other layers are written into it: forward, and behind it backward,
with what it computes again. That is cut where forward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fxshard import _compat
from fxshard.repetition.expansion import Shortened
from fxshard.repetition.numbering import Numbering, own_name
from fxshard.repetition.periods import Unrepeatable

BACKWARD = "fxshard_backward"
"""Marks the nodes of backward while they stand in one graph with those of forward."""

Parts = tuple[fx.GraphModule, fx.GraphModule]


def expand_parts(
    short: Shortened, parts: Parts, outputs: int, numbering: Numbering, tie: Callable[[fx.GraphModule], None]
) -> Parts:
    """Forward and backward of the whole model; raises :class:`~fxshard.repetition.periods.Unrepeatable`.

    ``outputs`` is how many results of forward are the model's, ``numbering`` that of the joint graph. ``tie`` is called
    with the graph of both, when it has all inputs.
    """
    joined, first = _join(parts, outputs, numbering)
    whole = short.expand_joined(joined, first, numbering)
    tie(whole)
    return _cut(whole, outputs)


def _join(parts: Parts, outputs: int, numbering: Numbering) -> tuple[fx.GraphModule, fx.Node]:
    """One graph of both, and where backward begins in it."""
    forward, backward = (part.graph for part in parts)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    taken = backward.find_nodes(op="placeholder")
    results = list(forward.output_node().args[0])  # type: ignore[arg-type]
    saved = dict(zip(taken, results[outputs:], strict=False))
    tangents = taken[len(saved) :]
    for node in [*forward.find_nodes(op="placeholder"), *tangents]:
        env[node] = graph.node_copy(node)
    for node in _computing(forward):
        env[node] = graph.node_copy(node, env.__getitem__)
    for inside, outside in saved.items():
        if not isinstance(outside, fx.Node):
            raise Unrepeatable
        env[inside] = env[outside]
    # Layers may share a constant, which stands in the last of them, where backward needs it first.
    own = sorted(_computing(backward), key=lambda node: not _is_shared_constant(node))
    if not own:
        raise Unrepeatable
    for node in own:
        name = numbering.repeated(node.name, constant=_is_shared_constant(node))
        env[node] = _copy(graph, node, env, name)
        env[node].meta[BACKWARD] = True
    gradients = fx.map_arg(backward.output_node().args[0], env.__getitem__)
    end = graph.output((*fx.map_arg(results[:outputs], env.__getitem__), *gradients))  # type: ignore[misc]
    end.meta["desc"] = [*forward.output_node().meta["desc"][:outputs], *backward.output_node().meta["desc"]]
    return _compat.graph_module(parts[0], graph), env[own[0]]


def _is_shared_constant(node: fx.Node) -> bool:
    return not node.all_input_nodes and len(node.users) > 1


def _computing(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _copy(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, fx.Node], name: str) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)  # type: ignore[misc]
    copy = graph.create_node(node.op, node.target, args, kwargs, name=name, type_expr=node.type)
    copy.meta.update(node.meta)
    return copy


def _cut(whole: fx.GraphModule, outputs: int) -> Parts:
    """Forward and backward. Forward returns what backward takes, in the order in which it is computed."""
    nodes = list(whole.graph.nodes)
    results: list[Any] = list(whole.graph.output_node().args[0])  # type: ignore[arg-type]
    tangents = [node for node in nodes if node.op == "placeholder" and node.name.startswith("tangents")]
    backward = {node for node in nodes if BACKWARD in node.meta}
    read = {ref for node in backward for ref in node.all_input_nodes}
    read.update(node for node in results[outputs:] if isinstance(node, fx.Node))
    saved = [node for node in nodes if node in read and node not in backward and node not in tangents]
    saved.sort(key=lambda node: bool(node.meta.get("saved_tensor_with_no_vc_check")))  # these are the last
    primals = [node for node in nodes if node.op == "placeholder" and node not in tangents]
    computed = [node for node in nodes if node.op not in ("placeholder", "output")]
    described = whole.graph.output_node().meta["desc"]
    ahead = [node for node in computed if node not in backward]
    behind = [node for node in computed if node in backward]
    kept = [*described[:outputs], *_compat.saved_outputs(saved)]
    return (
        _part(whole, primals, ahead, [*results[:outputs], *saved], kept),
        _part(whole, [*saved, *tangents], behind, results[outputs:], described[outputs:]),
    )


def _late(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes in their order, but shared constants where they are used first."""
    late = {node for node in nodes if BACKWARD in node.meta and _is_shared_constant(node)}
    ordered: dict[fx.Node, None] = {}
    for node in nodes:
        if node not in late:
            ordered.update(dict.fromkeys(ref for ref in node.all_input_nodes if ref in late))
            ordered[node] = None
    return [*ordered, *(node for node in nodes if node in late and node not in ordered)]


def _part(
    whole: fx.GraphModule,
    inputs: Sequence[fx.Node],
    inside: Sequence[fx.Node],
    results: Sequence[Any],
    described: Sequence[Any],
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.create_node("placeholder", node.name, name=node.name)
        env[node].meta.update(node.meta)
    for node in _late(inside):
        env[node] = _copy(graph, node, env, own_name(node.name))
        env[node].meta.pop(BACKWARD, None)
    graph.output(tuple(fx.map_arg(list(results), env.__getitem__))).meta["desc"] = list(described)
    return _compat.graph_module(whole, graph)
