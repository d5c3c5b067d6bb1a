"""DTensors that a captured graph takes, as the plain tensors they wrap: what a tensor-parallel model computes with.

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
from fxshard.frontend.tracing import duplicate, graph_inputs


@dataclass(frozen=True)
class Placing:
    """How a local tensor is wrapped."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def as_dtensor(local: torch.Tensor, placing: Placing) -> torch.Tensor:
    """A local tensor as a DTensor; its gradient comes back with the same placements."""
    return DTensor.from_local(
        local, placing.mesh, placing.placements, run_check=False, shape=placing.shape, stride=placing.stride
    )


Unwrap = Callable[[Sequence[Any]], list[Any]]


def with_plain_inputs(
    captured: fx.GraphModule, leaf: Callable[[DTensor], torch.Tensor] = plain_leaf
) -> tuple[fx.GraphModule, Unwrap] | None:
    """A captured graph that takes plain tensors only, and what makes its inputs from those of ``captured``.

    ``leaf``: the plain tensor of a DTensor. Meshes, which torch 2.13 makes inputs, become constants of the graph. None where there is nothing to change.
    """
    examples = graph_inputs(captured)
    if not any(isinstance(example, DTensor | DeviceMesh) for example in examples):
        return None
    graph = duplicate(captured)  # Dynamo looks at its own again, for what to call the result with
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
    return graph, lambda args: [leaf(args[i]) if isinstance(args[i], DTensor) else args[i] for i in kept]


def _wrap_inside(graph: fx.GraphModule, node: fx.Node, example: DTensor, constants: _Constants) -> None:
    placing = constants.node(Placing(example.device_mesh, example.placements, example.shape, example.stride()))
    with graph.graph.inserting_before(constants.before):
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
