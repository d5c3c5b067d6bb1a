"""How parameters are recognised in a graph: which input is which, and whose gradient an output is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

PARAM = "fxshard_param"
"""Key of ``node.meta`` that ties a graph input to its parameter. Set once on the joint graph, by position."""

GRADS = "fxshard_grads"
"""Key of the backward output's ``node.meta``: the :class:`ParamRef` (or None) whose gradient each output is."""


@dataclass(frozen=True, order=True)
class ParamRef:
    """A parameter as (bucket, position in the bucket's layout)."""

    bucket: int
    position: int


def param_inputs(graph: fx.Graph) -> dict[fx.Node, ParamRef]:
    """The placeholders that stand for sharded parameters."""
    return {node: node.meta[PARAM] for node in graph.find_nodes(op="placeholder") if node.meta.get(PARAM) is not None}
