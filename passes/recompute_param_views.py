"""Joint graph: nothing that is derived from parameters alone is saved for backward.

Requires parameters tied to inputs. Provides ``MUST_RECOMPUTE`` on every node whose inputs are all parameters or such
nodes: views, casts, transposes. Without it the partitioner saves the gathered weight, and ZeRO-3 silently becomes
ZeRO-2 in memory.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.passes.context import PassContext, param_inputs


def recompute_param_views(joint: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    derived = set(param_inputs(joint.graph))
    for node in joint.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and derived.issuperset(node.all_input_nodes):
            derived.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
    return joint
