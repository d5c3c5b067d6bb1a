"""Values that a program makes on the host while it runs: captured, it would never make them again."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxshard._torch import private


def changes_on_host(module: fx.GraphModule, device: torch.device) -> bool:
    """Whether a program draws random numbers on another device than its own, or copies something there.

    A captured kernel would go on with the number that it was given, and the copy be read before it is made. All else
    that is computed there is computed from constants: with inputs on the CPU nothing is captured.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return any(_changes(node, device) for graph in graphs for node in graph.nodes)


def _changes(node: fx.Node, device: torch.device) -> bool:
    made = _devices(node)
    # What has a result on the device runs there, also attention, which may return its random state on the host.
    if node.op != "call_function" or node.target is operator.getitem or not made or device in made:
        return False
    called = private.operator_of(node)
    random = called is None or torch.Tag.nondeterministic_seeded in called.tags
    return random or any(device in _devices(given) for given in node.all_input_nodes)


def _devices(node: fx.Node) -> set[torch.device]:
    return {value.device for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)}
