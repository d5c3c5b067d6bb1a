"""Under which key a captured graph's schedule is kept: a digest of all that it depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxshard import _compat
from fxshard.remembered.canonical import Unnamed, canonical
from fxshard.remembered.graphs import mapped
from fxshard.remembered.surroundings import surroundings

FORMAT = 3
"""Of what is kept."""


def key_of(graph: fx.GraphModule, inputs: Sequence[Any], *others: Any) -> str:
    """The key of a graph that was captured with ``inputs``; ``others`` is what fxshard was told to do with it.

    Raises :class:`~fxshard.remembered.canonical.Unnamed` if something in it may mean something else at the next start.
    """
    said = [str(FORMAT), *_graph(graph, {}), _inputs(inputs), canonical(others), surroundings()]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def _graph(module: fx.GraphModule, stretches: dict[Any, int]) -> list[str]:
    """A line for each node, and those of graphs inside.

    ``stretches``: those that are to be recomputed, which torch numbers through a whole process.
    """
    if _compat.constants(module):
        raise Unnamed("tensors that are part of the graph")
    for what, noted in module.meta.items():  # a policy that says what to recompute, for one
        if callable(noted) and _compat.own_name(noted) is None:
            raise Unnamed(f"{what} of the graph is {noted!r:.200}")
    number: dict[fx.Node, str] = {}
    lines: list[str] = []

    def numbered(value: Any) -> Any:
        return number[value] if isinstance(value, fx.Node) else value

    for node in module.graph.nodes:
        number[node] = f"%{len(number)}"
        if node.op == "get_attr":
            inner = getattr(module, str(node.target), None)
            if not isinstance(inner, fx.GraphModule):
                raise Unnamed(f"{node.target} of the graph")
            lines += ["{", *_graph(inner, stretches), "}"]
        elif node.op == "call_module":
            raise Unnamed(f"a module in the graph: {node.target}")
        target = canonical(node.target) if node.op == "call_function" else node.target
        arguments = canonical(mapped((node.args, node.kwargs), numbered))
        lines.append(f"{node.op} {node.name} {target} {arguments} {_where(node, stretches)}")
    return lines


def _where(node: fx.Node, stretches: dict[Any, int]) -> str:
    """The modules that a node stands in, by which fxshard names things, and what else was noted at it."""
    stack = node.meta.get("nn_module_stack") or {}
    modules = [(path, getattr(kind, "__qualname__", str(kind))) for path, kind in stack.values()]
    stretch = node.meta.get("ac_graph_id")
    number = stretches.setdefault(stretch, len(stretches)) if stretch is not None else None
    return canonical((modules, node.meta.get("custom"), node.meta.get("recompute"), number))


def _inputs(values: Sequence[Any]) -> str:
    """What kinds of values go in, and which of them share memory."""
    memory: dict[int, int] = {}
    said = []
    for value in values:
        if not isinstance(value, torch.Tensor):
            said.append(canonical(value))
            continue
        if not _compat.is_plain(value) or value.layout is not torch.strided or _compat.free_symbols(value):
            raise Unnamed(f"{type(value).__name__} goes in")
        shared = memory.setdefault(_compat.memory_of(value), len(memory))
        kind = (value.shape, value.stride(), value.dtype, value.device, value.requires_grad, value.is_leaf)
        flags = (value.is_conj(), value.is_neg(), isinstance(value, torch.nn.Parameter), value.storage_offset())
        said.append(canonical((kind, flags, shared, _compat.is_static(value))))
    return "\n".join(said)
