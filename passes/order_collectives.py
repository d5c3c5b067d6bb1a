"""Forward, backward, evaluation: the model's own collectives become events, with independent compute between start and
wait.

Requires the process groups noted on them. A collective starts as soon as what it sends is computed: of the nodes before
it, those that it does not need run after its start. Its wait stands at the first use: of the nodes after it, those that
do not need its result run before. So products of weight gradients, and whatever else is independent (a shared expert,
the router), hide it. Collectives keep the order in which the model makes them, across all groups: what moves follows
from the graph alone, never from durations, so it is the same on every rank.

Nothing moves past another collective, past something that writes to memory, or past a random number, so activations
live at most from one collective to the next.
"""

from __future__ import annotations

import torch
from torch import fx

from fxshard._torch import private
from fxshard._torch.errors import PassError
from fxshard.passes.context import PassContext
from fxshard.schedule.aliases import is_view
from fxshard.schedule.collectives import GROUP, stamp

PURE = ("aten", "prims", "fxshard")
"""Whose operators do nothing but compute; one of a user's may count its calls."""
PYTHON = ("_operator", "math")
"""Where functions on sizes come from, and the unpacking of a tuple."""


def order_collectives(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    starts = [node for node in graph.nodes if private.collective_name(node) is not None]
    for start in starts:
        if GROUP not in start.meta or not isinstance(start.meta.get("val"), torch.Tensor):
            raise PassError(
                f"{start.name} in the {context.phase} graph is a collective of several tensors, or in a process group "
                "that was not known when the model was captured; make one collective per tensor, in a group that "
                "exists before the model is called"
            )
    if starts and context.options.debug.overlap:
        _wait_at_first_use(graph)
        for start in starts:
            _start_early(start)
        for wait in reversed([node for node in graph.nodes if private.is_wait(node)]):
            _wait_late(wait)
    stamp(graph, context.phase)
    return module


def _wait_at_first_use(graph: fx.Graph) -> None:
    """Waits, and views of anything, move to right before the first node that computes with it.

    Views cost nothing where they stand, but one of a parameter, left before a wait, would have it gathered earlier.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    anchors: dict[fx.Node, fx.Node] = {}
    for node in reversed(list(graph.nodes)):
        if is_view(node) and node.users:  # what a wait gives is a view of what the collective gave
            anchors[node] = min((anchors.get(user, user) for user in node.users), key=order.__getitem__)
    for node in reversed(anchors):  # in the order of the graph
        anchors[node].prepend(node)


def _start_early(start: fx.Node) -> None:
    """Of the nodes between the last barrier and a collective, those that it does not need move behind it."""
    needed = set(start.all_input_nodes)
    moved: list[fx.Node] = []
    node = start.prev
    while not _is_barrier(node):
        if node in needed:
            needed.update(node.all_input_nodes)
        else:
            moved.append(node)
        node = node.prev
    for each in moved:  # the last of them first, so that they keep their order
        start.append(each)


def _wait_late(wait: fx.Node) -> None:
    """Of the nodes between a wait and the next barrier, those that do not need its result move before it.

    Not so views that only nodes which stay read: that of a parameter would have it gathered earlier.
    """
    late = {wait}
    free: list[fx.Node] = []
    node = wait.next
    while not _is_barrier(node):
        if late.isdisjoint(node.all_input_nodes):
            free.append(node)
        else:
            late.add(node)
        node = node.next
    moved: set[fx.Node] = set()
    for node in reversed(free):
        if not is_view(node) or not moved.isdisjoint(node.users):
            moved.add(node)
    for node in free:
        if node in moved:
            wait.prepend(node)


def _is_barrier(node: fx.Node) -> bool:
    """What nothing is moved past: collectives and their waits, the ends of a graph, writes, random numbers."""
    if node.op == "get_attr":
        return False
    if node.op != "call_function" or private.is_wait(node) or private.collective_name(node) is not None:
        return True
    target = private.operator_of(node)
    if target is None:
        return getattr(node.target, "__module__", None) not in PYTHON
    return target.namespace not in PURE or private.is_mutable(target) or private.draws_a_random_number(node)
