"""Graphs as bytes: plain data for the nodes, torch's own pickler for fake tensors and operators. torch 2.11, 2.13."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

KEPT = frozenset({"val", "user_visible_output_idxs"})
"""What of torch's annotations of nodes is kept; those of fxshard begin with its name and are, too."""


@dataclass(frozen=True)
class _Ref:
    """A node among the arguments of another, by its position."""

    at: int


class _Pickler(GraphPickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, fx.GraphModule):
            return _build, (_nodes(obj.graph), dict(obj.named_children()), _constants(obj))
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """Something that holds graph modules, fake tensors and operators, as bytes."""
    with io.BytesIO() as stream:
        _Pickler(stream, Options(ops_filter=None)).dump(value)
        return stream.getvalue()


def loads(data: bytes) -> Any:
    """What :func:`dumps` was given. Only for bytes that fxshard wrote: unpickling runs what they say."""
    return GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))


def _nodes(graph: fx.Graph) -> list[tuple[Any, ...]]:
    at = {node: i for i, node in enumerate(graph.nodes)}

    def plain(value: Any) -> Any:
        return fx.map_arg(value, lambda node: _Ref(at[node]))  # type: ignore[arg-type, return-value]

    def meta(node: fx.Node) -> dict[str, Any]:
        return {key: node.meta[key] for key in node.meta if key in KEPT or key.startswith("fxshard")}

    return [(node.op, node.name, node.target, plain(node.args), plain(node.kwargs), meta(node)) for node in graph.nodes]


def _constants(module: fx.GraphModule) -> dict[str, Any]:
    named = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    return {name: getattr(module, name) for name in named if not isinstance(getattr(module, name), nn.Module)}


def _build(nodes: list[tuple[Any, ...]], children: dict[str, nn.Module], constants: dict[str, Any]) -> fx.GraphModule:
    graph = fx.Graph()
    made: list[fx.Node] = []
    for op, name, target, args, kwargs, meta in nodes:
        made.append(graph.create_node(op, target, _replaced(args, made), _replaced(kwargs, made), name=name))
        made[-1].meta.update(meta)
    return _LazyGraphModule({**children, **constants}, graph)


def _replaced(value: Any, made: list[fx.Node]) -> Any:
    if isinstance(value, _Ref):
        return made[value.at]
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(each, made) for each in value)
    if isinstance(value, dict):
        return {key: _replaced(each, made) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*(_replaced(each, made) for each in (value.start, value.stop, value.step)))
    return value
