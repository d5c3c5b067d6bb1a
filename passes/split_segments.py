"""Lowering: cut the scheduled graph at its runtime nodes; each stretch of pure compute becomes a submodule.

Requires the runtime nodes in their final order, which is kept. Provides a graph of runtime nodes, calls of
``segment_0``, ``segment_1``, … and the plumbing between them. Views and symbolic sizes that a later segment needs are
recomputed there, so a segment never returns an alias of what it was given; so are values made from nothing, which are
cheaper to make than to keep.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from fxshard._torch import private
from fxshard.passes.context import PassContext
from fxshard.schedule.aliases import is_constant, is_view
from fxshard.schedule.events import event_of
from fxshard.schedule.graph_summary import unpacks


def split_segments(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    _gather_unpacking(module.graph)
    runs = _runs(module.graph)
    home = {node: i for i, run in enumerate(runs) for node in run}
    inputs = [_inputs(run, i, home) for i, run in enumerate(runs)]
    bound = [node for node in module.graph.nodes if _binds_a_size(node)]
    for number, (run, given) in enumerate(zip(runs, inputs, strict=True)):
        earlier = [node for node in bound if home.get(node, -1) < number]
        given += [size for size in _sizes(earlier, [*run, *given]) if size not in given]
    needed = {node for of_run in inputs for node in of_run} | set(module.graph.output_node().all_input_nodes)
    needed.update(arg for node in module.graph.nodes if is_runtime(node) for arg in node.all_input_nodes)

    top = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    segments: dict[str, fx.GraphModule] = {}
    done: set[int] = set()
    for node in module.graph.nodes:
        i = home.get(node)
        if i is None:
            env[node] = top.node_copy(node, env.__getitem__)
        elif i not in done:
            done.add(i)
            outputs = [member for member in runs[i] if member in needed]
            name = f"segment_{len(segments)}"
            segment = _segment(module, runs[i], inputs[i], outputs, i, home)
            segments[name] = segment
            call = top.create_node("call_module", name, tuple(env[arg] for arg in inputs[i]))
            call.meta["val"] = tuple(output.meta.get("val") for output in outputs)
            for position, output in enumerate(outputs):
                env[output] = top.call_function(operator.getitem, (call, position))
                env[output].meta.update(output.meta)
    split = private.graph_module(segments, top)
    top.lint()
    return split


def is_runtime(node: fx.Node) -> bool:
    """A runtime node, or the unpacking of one."""
    return event_of(node) is not None or unpacks(node)


def _gather_unpacking(graph: fx.Graph) -> None:
    """Put every unpacking right after what it unpacks, in the order that they have: a graph that was split before, and
    kept, is split the same way again.

    The views that a runtime node gives must not cut a stretch of compute, and a tuple must not cross into another one.
    """
    unpacked: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        if isinstance(node.args[0], fx.Node):
            unpacked.setdefault(node.args[0], []).append(node)
    for source, nodes in unpacked.items():  # what is in a tuple may be unpacked, too: after it, where it then is
        for node in reversed(nodes):
            source.append(node)


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    runs: list[list[fx.Node]] = []
    inside = False
    for node in graph.nodes:
        computes = node.op not in ("placeholder", "output") and not is_runtime(node)
        if computes and not inside:
            runs.append([])
        if computes:
            runs[-1].append(node)
        # A graph input does not end a stretch; only something the runtime does may.
        inside = computes or (inside and node.op == "placeholder")
    return runs


def _recomputed(node: fx.Node, run: int, home: dict[fx.Node, int]) -> bool:
    """Whether a later segment computes ``node`` again instead of receiving it."""
    if home.get(node, run) == run:
        return False
    if node.meta.get("unbacked_bindings"):
        return False  # a number read from data is read once: shapes of later inputs are in terms of it
    if node.op == "get_attr" or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
        return True
    return is_view(node) or is_constant(node)


def _inputs(nodes: Iterable[fx.Node], run: int, home: dict[fx.Node, int]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    stack = [arg for node in nodes for arg in node.all_input_nodes][::-1]
    while stack:
        node = stack.pop()
        if home.get(node) == run or node in found:
            continue
        if _recomputed(node, run, home):
            stack += reversed(node.all_input_nodes)
        else:
            found[node] = None
    return list(found)


def _binds_a_size(node: fx.Node) -> bool:
    """A symbolic size that is an input of the graph, or a number that is read from data."""
    given = node.op == "placeholder" or node.meta.get("unbacked_bindings")
    return bool(given) and isinstance(node.meta.get("val"), torch.SymInt)


def _sizes(bound: list[fx.Node], nodes: list[fx.Node]) -> list[fx.Node]:
    """Those that are symbolic sizes in the shapes of ``nodes``: a compiler cannot solve for them."""
    if not bound:
        return []
    used = set().union(*(private.free_symbols(node.meta.get("val")) for node in nodes))
    return [node for node in bound if private.free_symbols(node.meta["val"]) & used]


def _segment(
    module: fx.GraphModule,
    nodes: list[fx.Node],
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    run: int,
    home: dict[fx.Node, int],
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta.update(node.meta)
        env[node].meta.pop("unbacked_bindings", None)  # a number read from data is an input here

    def value(node: fx.Node) -> fx.Node:
        if node not in env:
            made_again = _recomputed(node, run, home) or is_constant(node)
            assert made_again, f"{node} is neither given to segment {run} nor computed in it"
            env[node] = graph.node_copy(node, value)
        return env[node]

    for node in nodes:
        if is_constant(node):
            continue  # made where it is first used, as in the segments of other layers that make it again
        for arg in node.all_input_nodes:
            value(arg)
        env[node] = graph.node_copy(node, value)
    output = graph.output(tuple(value(node) for node in outputs))
    # Segments are compiled apart: each must get its inputs in the strides that planning saw.
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    for node in reversed(graph.nodes):  # views that only later segments use; asked of all nodes this would be slow
        if not node.users and node.op not in ("placeholder", "output") and not node.is_impure():
            graph.erase_node(node)
    return private.graph_module(module, graph)
