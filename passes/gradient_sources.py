"""From which results of forward each gradient is computed: where no loss uses any of them, there is no gradient.

Autograd hands a compiled backward zeros for results that no loss was computed from. Parameters behind them would get
zeros for gradients, and an optimizer would decay them; in plain PyTorch they get none.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxshard._torch import private


def gradient_sources(graph: fx.Graph, gradients: Iterable[fx.Node]) -> dict[fx.Node, tuple[int, ...]]:
    """Results of forward, by number, for each gradient that depends on some of them and not on others."""
    tangents = {node: private.tangent_of(node) for node in graph.find_nodes(op="placeholder")}
    everything = frozenset(number for number in tangents.values() if number is not None)
    if len(everything) < 2:
        return {}
    found: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        own = tangents.get(node)
        inputs = [found[source] for source in node.all_input_nodes]
        # Most nodes have a neighbour's sources: one object for all of them.
        found[node] = max(inputs, key=len, default=frozenset()) if own is None else frozenset([own])
        if not all(each <= found[node] for each in inputs):
            found[node] = frozenset().union(*inputs)
    return {
        node: tuple(sorted(found[node]))
        for node in gradients
        if found[node] and found[node] != everything and private.OTHER_TANGENT not in found[node]
    }
