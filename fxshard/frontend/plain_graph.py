"""DTensors that a captured graph takes or gives, as the plain tensors they wrap: tensor-parallel parameters above all.

Dynamo keeps operators on DTensors as they are written. AOTAutograd traces through them, to operators on local tensors
and functional collectives, and gives the gradient of a DTensor in whatever placements it comes out. In a graph that
takes the local tensor and wraps it first, the gradient is brought to the placements of the parameter, as FSDP2 does it
after backward: that of a replicated norm under sequence parallelism is added up over the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard._torch import private
from fxshard.frontend.sharding import plain_leaf
from fxshard.frontend.tracing import graph_inputs


@dataclass(frozen=True)
class Placing:
    """How a local tensor is wrapped. Without a shape, which is then open, local tensors are equal parts."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size | None
    stride: tuple[int, ...] | None

    @classmethod
    def of(cls, value: DTensor) -> Placing:
        closed = not private.free_symbols(value)
        shape, stride = (value.shape, tuple(value.stride())) if closed else (None, None)
        return cls(private.real_mesh(value), value.placements, shape, stride)


def as_dtensor(local: torch.Tensor, placing: Placing) -> torch.Tensor:
    """A local tensor as a DTensor; its gradient comes back with the same placements."""
    return DTensor.from_local(
        local, placing.mesh, placing.placements, run_check=False, shape=placing.shape, stride=placing.stride
    )


def as_local(value: torch.Tensor) -> torch.Tensor:
    """What a DTensor wraps; its gradient is taken to have the same placements."""
    assert isinstance(value, DTensor)
    return value.to_local()


Run = Callable[..., Any]


@dataclass(frozen=True)
class PlainGraph:
    """A captured graph that takes and gives plain tensors only."""

    graph: fx.GraphModule
    kept: tuple[int, ...]
    """The inputs of the captured graph that are left."""
    results: tuple[Placing | None, ...]
    """How results are wrapped."""

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        return [plain_leaf(args[i]) if isinstance(args[i], DTensor) else args[i] for i in self.kept]

    def called(self, run: Run) -> Run:
        """What Dynamo calls, given what runs this graph."""
        if not any(self.results):
            return lambda *args: run(*self.inputs(args))

        def call(*args: Any) -> list[Any]:
            results = run(*self.inputs(args))
            return [
                value if placing is None else as_dtensor(value, placing)
                for value, placing in zip(results, self.results, strict=True)
            ]

        return call


def plain_graph(captured: fx.GraphModule) -> PlainGraph | None:
    """The graph without DTensors at its ends; None where there are none.

    Meshes, which torch 2.13 makes inputs, become constants of the graph.
    """
    examples = graph_inputs(captured)
    (given,) = captured.graph.output_node().args
    results = [_placing(node) for node in given]  # type: ignore[union-attr]
    if not any(isinstance(example, DTensor | DeviceMesh) for example in examples) and not any(results):
        return None
    graph = private.copied(captured)  # Dynamo looks at its own again, for what to call the result with
    inputs = graph.graph.find_nodes(op="placeholder")
    constants = _Constants(graph, inputs[-1].next)
    kept = []
    for i, (node, example) in enumerate(zip(inputs, examples, strict=True)):
        if isinstance(example, DeviceMesh):
            node.replace_all_uses_with(constants.node(example))
            graph.graph.erase_node(node)
            continue
        kept.append(i)
        if isinstance(example, DTensor):
            _wrap_inside(graph, node, example, constants)
    if any(results):
        _unwrap_results(graph, results)
    return PlainGraph(graph, tuple(kept), tuple(results))


def _placing(node: Any) -> Placing | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return Placing.of(value) if isinstance(value, DTensor) else None


def _unwrap_results(graph: fx.GraphModule, results: Sequence[Placing | None]) -> None:
    end = graph.graph.output_node()
    given: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    with graph.graph.inserting_before(end):
        for i, placing in enumerate(results):
            if placing is not None:
                local = graph.graph.call_function(as_local, (given[i],))
                local.meta["example_value"] = private.wrapped(given[i].meta["example_value"])
                given[i] = local
    end.args = (tuple(given),)


def _wrap_inside(graph: fx.GraphModule, node: fx.Node, example: DTensor, constants: _Constants) -> None:
    placing = constants.node(Placing.of(example))
    # At its first use: layers that repeat have what they wrap among their own nodes.
    with graph.graph.inserting_before(min(node.users, default=constants.before)):
        wrapped = graph.graph.call_function(as_dtensor, (node, placing))
    node.replace_all_uses_with(wrapped, delete_user_cb=lambda user: user is not wrapped)
    wrapped.meta["example_value"] = node.meta["example_value"]
    node.meta["example_value"] = private.wrapped(node.meta["example_value"])
    node.type = torch.Tensor


class _Constants:
    """Objects that are no tensors, as attributes of a graph; equal ones are one, so that layers stay alike."""

    def __init__(self, graph: fx.GraphModule, before: fx.Node) -> None:
        self._graph, self.before = graph, before
        self._nodes: dict[Any, fx.Node] = {}

    def node(self, value: Any) -> fx.Node:
        if value not in self._nodes:
            name = f"_fxshard_constant_{len(self._nodes)}"
            setattr(self._graph, name, value)
            with self._graph.graph.inserting_before(self.before):
                self._nodes[value] = self._graph.graph.create_node("get_attr", name)
        return self._nodes[value]
