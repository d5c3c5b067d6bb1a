"""Joint graph: cos and sin of positions run as torch's own kernels, and what is made of them is saved for backward.

Rotary embeddings multiply by cos and sin of a table of angles that depends on no parameter. A compiler fuses them into
the first kernel that reads them, in forward, and, because they are cheap, computes them again in backward. What they
cost is the time to the first step: Triton needs 3.7 s for a kernel with both (docs/design/compile-path.md), once in
each direction, and the last layer's backward, which computes them for all layers, is a compilation of its own.
Provides ``fxshard::cos`` and ``fxshard::sin``, which a compiler calls as they are, and ``MUST_SAVE`` on what layers
read of them; what the model itself says about a node stands.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.kernels.ops import cos, sin
from fxshard.passes.context import PassContext
from fxshard.schedule.aliases import is_view
from fxshard.schedule.params import PARAM

_EXTERN = {torch.ops.aten.cos.default: cos, torch.ops.aten.sin.default: sin}


def extern_tables(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    trained: set[fx.Node] = set()  # what depends on a parameter, or on a gradient
    tables: dict[fx.Node, fx.Node] = {}  # what is made of cos and sin alone, and whose memory it is
    for node in module.graph.nodes:
        if node.op == "placeholder":
            depends = node.meta.get(PARAM) is not None or node.name.startswith("tangents")
        else:
            depends = any(source in trained for source in node.all_input_nodes)
        if depends:
            trained.add(node)
        elif node.op == "call_function" and node.target in _EXTERN:
            node.target = _EXTERN[node.target]
            tables[node] = node
        elif any(source in tables for source in node.all_input_nodes):
            tables[node] = tables.get(node.all_input_nodes[0], node) if is_view(node) else node
    for node, memory in tables.items():
        if any(user in trained for user in node.users) and "recompute" not in memory.meta:
            memory.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            memory.meta.setdefault("ac_graph_id", 0)
    return module
