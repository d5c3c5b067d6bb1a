"""Forward, backward, evaluation: the model's own collectives become events, with independent compute between start and
wait.

Requires the process groups noted on them. A collective starts as soon as what it sends is computed, and of the nodes
before it, those that it does not need run after its start. Its wait stands at the first use: of the nodes after it,
those that do not need its result run before. So products of weight gradients, and whatever else is independent (a
shared expert, the router), hide it. The order of collectives, across all groups, is the order in which what they send
is computed: it follows from the graph alone, never from durations, so it is the same on every rank.

No compute moves past another collective, past something that writes to memory, or past a random number, so activations
live at most from one collective to the next.
"""

from __future__ import annotations

import torch
from torch import fx

from fxshard._torch import private
from fxshard._torch.errors import PassError
from fxshard.passes.context import PassContext
from fxshard.schedule.aliases import is_view, root_of
from fxshard.schedule.collectives import GROUP, stamp
from fxshard.schedule.events import event_of

PURE = ("aten", "prims", "fxshard")
"""Whose operators do nothing but compute; one of a user's may count its calls."""
PYTHON = ("_operator", "math")
"""Where functions on sizes come from, and the unpacking of a tuple."""


def order_collectives(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    starts = [node for node in graph.nodes if _is_start(node)]
    if all(event_of(start) is not None for start in starts):
        return module  # there is none, or this was done before the graph was copied, to be scheduled several times
    for start in starts:
        if GROUP not in start.meta or not isinstance(start.meta.get("val"), torch.Tensor):
            raise PassError(
                f"{start.name} in the {context.phase} graph is a collective of several tensors, or in a process group "
                "that was not known when the model was captured; make one collective per tensor, in a group that "
                "exists before the model is called"
            )
    if context.options.debug.overlap:
        _start_when_ready(graph, starts)
        _wait_at_first_use(graph)
        for start in [node for node in graph.nodes if _is_start(node)]:
            _start_early(start)
        for wait in reversed([node for node in graph.nodes if private.is_wait(node)]):
            _wait_late(wait)
    stamp(graph, context.phase)
    return module


def _start_when_ready(graph: fx.Graph, starts: list[fx.Node]) -> None:
    """Collectives move up to right after the last node that they need.

    DTensor makes some much later than that: sums of gradients of replicated parameters stand at the end of backward,
    and the buckets of all layers would be complete only there.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = next(node for node in graph.nodes if node.op == "call_function")
    for start in reversed(starts):  # of several after one node, the first of the model comes first
        last = max(start.all_input_nodes, key=order.__getitem__)
        if last.op == "call_function":
            last.append(start)
        elif start is not first:
            first.prepend(start)
            first = start


def _is_start(node: fx.Node) -> bool:
    return private.collective_name(node) is not None


def _wait_at_first_use(graph: fx.Graph) -> None:
    """Waits, and views of anything, move to right before the first node that computes with it.

    Views cost nothing where they stand, but one of a parameter, left before a wait, would have it gathered earlier.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    output = graph.output_node()
    anchors: dict[fx.Node, fx.Node] = {}
    for node in reversed(list(graph.nodes)):
        if is_view(node) and node.users:  # what a wait gives is a view of what the collective gave
            anchors[node] = min((anchors.get(user, user) for user in node.users), key=order.__getitem__)
    returned = _waits_that_are_returned(anchors, output)
    further_down = {node for node in anchors if anchors[node] is not output}
    for node in reversed(anchors):  # in the order of the graph
        wait = root_of(node, private.is_wait)
        if anchors[node] is not output:
            anchors[node].prepend(node)
        elif wait in returned:
            returned[wait].prepend(node)
        elif node.all_input_nodes[0] in further_down:
            node.all_input_nodes[0].append(node)
            further_down.add(node)


def _waits_that_are_returned(anchors: dict[fx.Node, fx.Node], output: fx.Node) -> dict[fx.Node, fx.Node]:
    """{a wait whose result nothing computes with: before what it is to stand}

    A gradient is to be reduced soon, and not at the end. Collectives of a group run one after another, so where a later
    one is waited for, the earlier one is over anyway.
    """
    found: dict[fx.Node, fx.Node] = {}
    next_of_group: dict[str, fx.Node] = {}
    starts = [node for node in output.graph.nodes if _is_start(node)]
    for start in reversed(starts):
        group = start.meta[GROUP].name
        for wait in filter(private.is_wait, start.users):
            anchor = anchors.get(wait, output)
            if anchor is output:
                found[wait] = next_of_group.get(group, output)
            else:
                next_of_group[group] = anchor
    return found


def _start_early(start: fx.Node) -> None:
    """Of the nodes between the last barrier and a collective, those that it does not need move to after it."""
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
    if node.op != "call_function" or private.is_wait(node) or _is_start(node):
        return True
    target = private.operator_of(node)
    if target is None:
        return getattr(node.target, "__module__", None) not in PYTHON
    return target.namespace not in PURE or private.is_mutable(target) or private.draws_a_random_number(node)
