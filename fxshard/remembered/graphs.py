"""Graphs as bytes, and back.

Torch has a pickler of graphs, which describes each tensor with the storage, the views and the subclasses it may have.
Graphs that are scheduled have plain fake tensors of known sizes, which are a few numbers each.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxshard import _compat
from fxshard.remembered.canonical import Unnamed

LEFT_BEHIND = {*_compat.OF_THE_SCRIPT, "stack_trace", "example_value"}
"""What nodes know about where they come from, in a program that may have changed since."""


@dataclass(frozen=True)
class _Node:
    """A reference to the node at a position."""

    at: int


@dataclass(frozen=True)
class _Tensor:
    """A reference to a tensor of the table."""

    at: int


@dataclass(frozen=True)
class _Graph:
    """Another of the graphs, which a node calls under a name."""

    called: str
    name: Any


def dumps(graphs: Mapping[Any, fx.GraphModule], *others: Any) -> bytes:
    """Graphs, and values beside them; raises :class:`~fxshard.remembered.canonical.Unnamed` if there is anything in
    them that another process may not have. A graph may call those before it."""
    tensors = _Tensors()
    written: dict[Any, list[tuple[Any, ...]]] = {}
    names: dict[int, Any] = {}
    for name, module in graphs.items():
        written[name] = _write(module, tensors, names)
        names[id(module)] = name
    file = io.BytesIO()
    try:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump((written, tensors.described, others))
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # what pickle says of what it cannot pickle
        raise Unnamed(str(error)) from error
    return file.getvalue()


def loads(data: bytes) -> tuple[dict[Any, fx.GraphModule], Any]:
    """The graphs and the values that were made to ``data``."""
    written, described, others = pickle.loads(data)
    tensors = _compat.fake_tensors(described)
    found: dict[Any, fx.GraphModule] = {}
    for name, nodes in written.items():
        found[name] = _read(nodes, tensors, found)
    return found, others


class _Tensors:
    """The fake tensors of some graphs, each once: which are the same, and which share memory, means something."""

    def __init__(self) -> None:
        self.described: list[tuple[Any, ...]] = []
        self._at: dict[int, _Tensor] = {}
        self._storages: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def __call__(self, value: torch.Tensor) -> _Tensor:
        if id(value) not in self._at:
            described = _compat.described_fake(value)
            if described is None:
                raise Unnamed(f"{type(value).__name__} of {tuple(value.shape)}")
            storage = self._storages.setdefault(_compat.memory_of(value), len(self._storages))
            self._at[id(value)] = _Tensor(len(self.described))
            self.described.append((storage, *described))
            self._alive.append(value)
        return self._at[id(value)]


def _write(module: fx.GraphModule, tensors: _Tensors, names: Mapping[int, Any]) -> list[tuple[Any, ...]]:
    at: dict[fx.Node, _Node] = {}
    written: list[tuple[Any, ...]] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value not in at:
                raise Unnamed(f"a node that refers to {value}, behind it")
            return at[value]
        return tensors(value) if isinstance(value, torch.Tensor) else value

    for node in module.graph.nodes:
        target = node.target
        if node.op == "call_module":
            target = _Graph(target, names.get(id(module.get_submodule(target))))
        if node.op == "get_attr" or (isinstance(target, _Graph) and target.name is None):
            raise Unnamed(f"{node.op} {node.target}")
        meta = {key: mapped(value, leaf) for key, value in node.meta.items() if key not in LEFT_BEHIND}
        given = mapped(node.args, leaf), mapped(node.kwargs, leaf)
        written.append((node.op, node.name, target, *given, node.type, meta))
        at[node] = _Node(len(at))
    return written


def _read(
    written: list[tuple[Any, ...]], tensors: list[torch.Tensor], others: Mapping[Any, fx.GraphModule]
) -> fx.GraphModule:
    graph = fx.Graph()
    called: dict[str, fx.GraphModule] = {}
    nodes: list[fx.Node] = []

    def leaf(value: Any) -> Any:
        kind = type(value)
        return nodes[value.at] if kind is _Node else tensors[value.at] if kind is _Tensor else value

    for op, name, target, args, kwargs, kind, meta in written:
        if op == "call_module":
            called[target.called], target = others[target.name], target.called
        node = graph.create_node(op, target, mapped(args, leaf), mapped(kwargs, leaf), name, kind)
        if node.name != name:
            raise Unnamed(f"{name} became {node.name}")
        node.meta = {key: mapped(value, leaf) for key, value in meta.items()}
        nodes.append(node)
    return _compat.graph_module(called, graph)


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A value with what is in its tuples, lists and dicts replaced."""
    kind = type(value)
    if kind is tuple:
        return tuple([mapped(item, leaf) for item in value])
    if kind is list or kind is fx.immutable_collections.immutable_list:
        return [mapped(item, leaf) for item in value]
    if kind is dict or kind is fx.immutable_collections.immutable_dict:
        return {key: mapped(item, leaf) for key, item in value.items()}
    if kind is slice:
        return slice(*(mapped(item, leaf) for item in (value.start, value.stop, value.step)))
    return leaf(value)


_NEVER = (torch.Tensor, torch.SymInt, torch.nn.Module, torch._ops.HigherOrderOperator)


class _Pickler(pickle.Pickler):
    """Pickles nothing but plain values and what torch, Python and fxshard have by name."""

    def reducer_override(self, value: Any) -> Any:
        operator = _compat.operator_path(value)
        if operator is not None:
            return _compat.operator_at, operator
        named = value if callable(value) else type(value)
        if _compat.own_name(named) is None or isinstance(value, _NEVER):
            raise Unnamed(f"{type(value).__name__} {value!r:.200}")
        return NotImplemented
