"""Forward: what is computed for backward alone stands after what it is made of, in its own layer.

The partitioner puts what it takes from backward to the end of forward, the last layer's first: there it would be a
part of the last segment, one that grows with the model. Requires what the partitioner gives.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxshard._torch import private


def settle_saved(forward: fx.GraphModule, outputs: int) -> None:
    """Move it, in place. ``outputs``: how many results of forward are the model's."""
    nodes = list(forward.graph.nodes)
    results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    place = {node: i for i, node in enumerate(nodes)}
    ends = list(nodes)  # of each place: the node that was put there last
    last = max((place[node] for node in results[:outputs] if isinstance(node, fx.Node)), default=0)
    for node in nodes[last + 1 : -1]:
        source = max(node.all_input_nodes, key=place.__getitem__, default=None)
        if source is not None and source.op != "placeholder" and _is_movable(node):
            place[node] = place[source]
            ends[place[node]].append(node)
            ends[place[node]] = node


def _is_movable(node: fx.Node) -> bool:
    called = private.operator_of(node)
    if called is None:
        return node.target is operator.getitem
    return not private.is_mutable(called) and not private.is_random(called)
