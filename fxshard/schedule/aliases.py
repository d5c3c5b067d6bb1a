"""Nodes of a graph that share memory with others, and nodes that make constants."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx

from fxshard._torch import private
from fxshard.schedule.events import restore

# Their schemas promise a fresh tensor, their kernels return a view.
_HIDDEN_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
    torch.ops.aten.unsafe_chunk.default,
    torch.ops._c10d_functional.wait_tensor.default,
}


_KNOWN: dict[int, tuple[torch._ops.OpOverload, bool]] = {}
"""Whether operators return views, by their identity: asked of every node again and again, and their hash is slow."""


def is_view(node: fx.Node) -> bool:
    """Whether the node's value shares memory with its first argument."""
    known = _KNOWN.get(id(node.target))
    if known is not None:
        return known[1]
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if node.op == "call_function" and node.target is restore:
        return True
    target = private.operator_of(node)
    if target is None:
        return False
    _KNOWN[id(target)] = target, target in _HIDDEN_VIEWS or private.returns_view(target)
    return _KNOWN[id(target)][1]


def root_of(node: fx.Node, stop: Callable[[fx.Node], object] | None = None) -> fx.Node:
    """The node that has the memory of a value; or, of the views on the way to it, the first where to ``stop``."""
    while is_view(node) and not (stop is not None and stop(node)):
        node = node.all_input_nodes[0]
    return node


def readers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Every node that reads the memory of ``nodes``, directly or through any chain of views.

    A functional collective reads until it is waited for.
    """
    found: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found[user] = None
                if is_view(user):
                    stack.append(user)
                elif private.collective_name(user) is not None:
                    found |= dict.fromkeys(filter(private.is_wait, user.users))
    return list(found)


_PURE = ("aten", "prims")
"""Namespaces whose operators are known to make the same of the same numbers. One of a user's may read a file, count its
calls, or draw random numbers without saying so: it runs as often as the model calls it."""


def is_constant(node: fx.Node) -> bool:
    """Whether a node makes the same tensor whenever it runs, from sizes and numbers alone, and no node writes to it.

    To make one again costs less than to keep it: torch merges those of all layers into one, which would live from the
    first layer to the last, and be an input of all of them but one.
    """
    target = private.operator_of(node)
    if target is None or target.namespace not in _PURE or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if not all(isinstance(source.meta.get("val"), torch.SymInt | int) for source in node.all_input_nodes):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not any(map(_writes, readers([node])))


def _writes(node: fx.Node) -> bool:
    target = private.operator_of(node)
    return target is not None and private.is_mutable(target)
