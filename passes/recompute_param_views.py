"""Joint graph: nothing that is derived from parameters alone, or made from nothing, is saved for backward.

Requires parameters tied to inputs. Provides ``MUST_RECOMPUTE`` on every node whose inputs are all parameters or such
nodes: views, casts, transposes; values that codes stand for, looked up in a table. Without it the partitioner saves the
gathered weight, and ZeRO-3 silently becomes ZeRO-2 in memory. It saves zeros, too, which experts add their tokens to:
one layer's forward would differ from all others' by returning them.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard._torch import private
from fxshard.passes.context import PassContext
from fxshard.schedule.aliases import is_constant, is_view
from fxshard.schedule.params import param_inputs


def recompute_param_views(joint: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    derived = set(param_inputs(joint.graph))
    constants: set[fx.Node] = set()
    # What a later checkpointed region reads of an earlier one torch saves. It merges what is equal, so one node may
    # stand for those of all regions: none may be later than it.
    latest = max((node.meta.get("ac_graph_id", 0) for node in joint.graph.nodes), default=0)
    for node in joint.graph.nodes:
        sources = node.all_input_nodes
        table = _table(node)
        from_parameters = node.op == "call_function" and bool(sources) and derived.issuperset({*sources} - {table})
        if from_parameters:
            derived.add(node)
        if is_constant(node) or (is_view(node) and sources[0] in constants):
            constants.add(node)
        if from_parameters or node in constants:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = latest
    return joint


def _table(node: fx.Node) -> fx.Node | None:
    """The input of the graph, a buffer, in which a node looks something up by all of its other sources."""
    if private.operator_of(node) is not torch.ops.aten.index.Tensor:
        return None
    table, indices = node.args[:2]
    return table if isinstance(table, fx.Node) and table.op == "placeholder" and table not in indices else None  # type: ignore[operator]
