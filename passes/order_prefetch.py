"""Forward, backward, evaluation: when each gather starts.

Requires ``insert_unshard`` and ``insert_reshard``. Moves every ``unshard`` ahead of its ``wait``: gather ``k`` starts
once bucket ``k - depth`` is in use and everything before that one is released, so ``depth + 1`` gathered buckets are
enough. Depth 0 gathers where the bucket is needed. The order of gathers never changes: all ranks agree on it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxshard.events import META, Kind, events
from fxshard.passes.context import PassContext


def order_prefetch(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    depth = context.options.prefetch
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    by_kind: dict[Kind, dict[int, fx.Node]] = {kind: {} for kind in Kind}
    for node, event in events(graph):
        by_kind[event.kind][event.bucket_index] = node
    sequence = list(by_kind[Kind.UNSHARD])  # in order of first use
    if depth == 0 or not sequence:
        return module

    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for k, index in enumerate(sequence):
        launch, needed = by_kind[Kind.UNSHARD][index], by_kind[Kind.WAIT][index]
        if k < depth:
            if launch is first:
                first = first.next
            else:
                first.prepend(launch)
            launch.meta[META] = replace(launch.meta[META], why="at the start")
            continue
        ahead = by_kind[Kind.WAIT][sequence[k - depth]]
        released = [
            by_kind[Kind.RESHARD][earlier]
            for earlier in sequence[: k - depth]
            if earlier in by_kind[Kind.RESHARD] and order[by_kind[Kind.RESHARD][earlier]] < order[needed]
        ]
        after = max([ahead, *released], key=order.__getitem__)
        _move(after, launch, why=f"{depth} ahead: starts with {_bucket(after)}")
    return module


def _move(after: fx.Node, launch: fx.Node, why: str) -> None:
    # Behind the views that a wait is unpacked into, and behind gathers already moved here: first needed, first started.
    while after.next.op == "call_function" and (after.next.target is launch.target or _unpacks(after.next)):
        after = after.next
    if after is not launch:
        after.append(launch)
    launch.meta[META] = replace(launch.meta[META], why=why)


def _unpacks(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.meta.get(META) is not None


def _bucket(node: fx.Node) -> str:
    return node.meta[META].bucket
