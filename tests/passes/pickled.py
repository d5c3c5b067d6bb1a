"""Graphs as bytes: plain data for the nodes, torch's own pickler for fake tensors and operators."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class Ref:
    """A node among the arguments of another, by its position."""

    at: int


class Pickler(GraphPickler):
    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, fx.GraphModule):
            return super().reducer_override(obj)
        at = {node: i for i, node in enumerate(obj.graph.nodes)}
        nodes = []
        for node in obj.graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda other: Ref(at[other]))  # type: ignore[arg-type, return-value]
            meta = {key: value for key, value in node.meta.items() if key == "val" or key.startswith("fxshard")}
            nodes.append((node.op, node.name, node.target, args, kwargs, meta))
        return build, (nodes, dict(obj.named_children()))


def build(nodes: list[tuple[Any, ...]], children: dict[str, Any]) -> fx.GraphModule:
    graph = fx.Graph()
    made: list[fx.Node] = []
    for op, name, target, args, kwargs, meta in nodes:
        args, kwargs = tree_map_only(Ref, lambda ref: made[ref.at], (args, kwargs))
        made.append(graph.create_node(op, target, args, kwargs, name=name))
        made[-1].meta.update(meta)
    return fx.GraphModule(children, graph)


def dumps(value: Any, *, shared: bool = True) -> bytes:
    """``shared``: whether an object that is there twice is written once; off, equal values give equal bytes."""
    with io.BytesIO() as stream:
        pickler = Pickler(stream, Options(ops_filter=None))
        pickler.fast = not shared
        pickler.dump(value)
        return stream.getvalue()


def loads(data: bytes) -> Any:
    return GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
