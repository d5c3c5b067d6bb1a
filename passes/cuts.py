"""Where a graph may be cut without costing a fusion: right after a node that no compiler fuses anything into.

Runtime nodes split the graph into segments that are compiled apart. A cut between two pointwise nodes would force a
round trip through memory; a cut after a matrix product costs nothing, because its result goes to memory anyway.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right

from torch import fx
from torch.utils.flop_counter import flop_registry

from fxshard._torch import private
from fxshard.schedule.events import OF_MODEL, event_of

_LOOKUPS = {"embedding", "embedding_dense_backward", "_unsafe_masked_index_put_accumulate"}

_KERNELS = {
    *_LOOKUPS,
    "_grouped_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
"""Kernels of their own for which torch has no flop formula."""


def is_heavy(node: fx.Node) -> bool:
    """Matrix products, convolutions, attention, embeddings, our own ops: nodes that are kernels of their own."""
    target = private.operator_of(node)
    if target is None:
        return False
    own = target.namespace == "fxshard"
    return own or target.overloadpacket in flop_registry or private.operator_name(target) in _KERNELS


def is_lookup(node: fx.Node) -> bool:
    """An embedding or its gradient: a kernel of its own that multiplies nothing, and is over soon."""
    target = private.operator_of(node)
    return target is not None and private.operator_name(target) in _LOOKUPS


def _communicates(node: fx.Node) -> bool:
    event = event_of(node)
    return event is not None and event.kind in OF_MODEL


class CutPoints:
    """Positions in a graph at which runtime nodes may stand, fixed when the object is made.

    A position is the node *before* which to insert. The first computing node and the output are positions too.
    """

    def __init__(self, graph: fx.Graph) -> None:
        nodes = list(graph.nodes)
        self._position = {node: i for i, node in enumerate(nodes)}
        self._nodes = nodes
        first = next(i for i, node in enumerate(nodes) if node.op not in ("placeholder", "get_attr"))
        last = len(nodes) - 1
        after_heavy = {self._past_outputs(i) for i, node in enumerate(nodes) if is_heavy(node)}
        own = [i for i, node in enumerate(nodes) if _communicates(node)]  # where the graph is cut anyway
        self._cuts = sorted({first, last, *own} | after_heavy | {self._past_outputs(i) for i in own})

    @property
    def start(self) -> fx.Node:
        """The first computing node, before which nothing is cut."""
        return self._nodes[self._cuts[0]]

    def at_or_before(self, node: fx.Node) -> fx.Node:
        """The latest cut from which ``node`` is still ahead."""
        return self._nodes[self._cuts[bisect_right(self._cuts, self._position[node]) - 1]]

    def after(self, node: fx.Node) -> fx.Node:
        """The earliest cut after ``node``."""
        position = min(self._position[node] + 1, len(self._nodes) - 1)
        return self._nodes[self._cuts[bisect_left(self._cuts, position)]]

    def _past_outputs(self, position: int) -> int:
        """After the node and the getitems that unpack it: a tuple never crosses a segment boundary."""
        position += 1
        while self._nodes[position].target is operator.getitem and self._nodes[position].op == "call_function":
            position += 1
        return position
