"""Forward, backward, evaluation: release each gathered bucket after its last use, counting views of it as uses.

Requires ``insert_unshard``. Provides one ``reshard`` per gathered bucket that is not resident. A parameter whose memory
leaves the graph is an error: the caller would hold a view of a buffer that the next gather overwrites.
"""

from __future__ import annotations

from torch import fx

from fxshard._torch.errors import PassError
from fxshard.passes.context import PassContext
from fxshard.passes.cuts import CutPoints
from fxshard.schedule.aliases import readers
from fxshard.schedule.events import Kind, events, insert


def insert_reshard(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    cuts = CutPoints(graph)
    for wait, event in list(events(graph)):
        if event.kind is not Kind.WAIT or context.buckets[event.bucket_index].resident:
            continue
        bucket = context.buckets[event.bucket_index]
        uses = readers(wait.users)
        escaping = [node for node in uses if node.op == "output"]
        if escaping:
            raise PassError(
                f"the {context.phase} graph returns memory of a parameter of {bucket.name!r} "
                f"({', '.join(bucket.params)}); "
                "return a copy from the model (for example weight.clone()) instead of the parameter or a view of it"
            )
        last = max(uses, key=order.__getitem__)
        with graph.inserting_before(cuts.after(last)):
            insert(graph, Kind.RESHARD, bucket, phase=context.phase, group=context.group, why=f"last use: {last.name}")
    return module
