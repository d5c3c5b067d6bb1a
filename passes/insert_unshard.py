"""Forward, backward, evaluation: gather each bucket before its first use and read parameters from it.

Requires parameters tied to inputs. Provides an ``unshard`` and a ``wait`` per bucket the graph uses, the latter at the
last cut before the bucket's first use, or at the start where there is nothing to wait for; every use of a parameter
input becomes a view that ``wait`` gives. An input that is only passed on (saved for backward) stays as it is: it is
hollow and costs nothing.
"""

from __future__ import annotations

import operator

from torch import fx

from fxshard.passes.context import PassContext
from fxshard.passes.cuts import CutPoints
from fxshard.schedule.events import Kind, Phase, insert
from fxshard.schedule.params import ParamRef, param_inputs


def insert_unshard(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    cuts = CutPoints(graph)
    for bucket_index, uses in _uses_by_bucket(graph).items():
        bucket = context.buckets[bucket_index]
        first = min((user for _, users in uses.values() for user in users), key=order.__getitem__)
        # What is resident was refreshed in forward: backward only needs the views, and takes them where nothing is cut.
        refreshed = bucket.resident and context.phase is Phase.BACKWARD
        with graph.inserting_before(cuts.start if refreshed else cuts.at_or_before(first)):
            if not refreshed:
                insert(graph, Kind.UNSHARD, bucket, phase=context.phase, group=context.group, why="needed here")
            used = next(ref for ref, users in uses.values() if first in users)
            why = f"first use: {bucket.params[used.position]}"
            wait = insert(graph, Kind.WAIT, bucket, phase=context.phase, group=context.group, why=why)
            wait.meta["val"] = (None,) * len(bucket.params)
            for placeholder, (ref, users) in uses.items():
                view = graph.call_function(operator.getitem, (wait, ref.position))
                view.meta["val"] = placeholder.meta.get("val")
                for user in users:
                    user.replace_input_with(placeholder, view)
    return module


def _uses_by_bucket(graph: fx.Graph) -> dict[int, dict[fx.Node, tuple[ParamRef, list[fx.Node]]]]:
    """{bucket: {input: (its place in the bucket, the nodes that compute with it)}} in order of first use."""
    by_bucket: dict[int, dict[fx.Node, tuple[ParamRef, list[fx.Node]]]] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = []
    for placeholder, ref in param_inputs(graph).items():
        users = [user for user in placeholder.users if user.op != "output"]
        if users:
            inputs.append((min(order[user] for user in users), placeholder, ref, users))
    for _, placeholder, ref, users in sorted(inputs, key=lambda entry: entry[0]):
        by_bucket.setdefault(ref.bucket, {})[placeholder] = (ref, users)
    return by_bucket
