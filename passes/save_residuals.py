"""Joint graph: the first sum of a residual stream is saved for backward like all that follow.

Where a layer adds to what it was given, torch saves the sum, but not where the first layer adds to a lookup: there it
saves the product and adds again. That takes as much memory, and makes the first layer's backward unlike all others': a
compilation of its own. Provides ``MUST_SAVE`` on such sums; what the model itself says about a node stands. A product
that other nodes read, too, may have to be saved anyway, and the sum would come on top: there torch decides.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.passes.context import PassContext
from fxshard.passes.cuts import is_heavy, is_lookup
from fxshard.schedule.aliases import is_view, readers, root_of


def save_residuals(joint: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        terms = [root_of(term) for term in node.all_input_nodes]
        looked_up = [term for term in terms if is_lookup(term)]
        products = [term for term in terms if is_heavy(term) and not is_lookup(term) and _only_in(node, term)]
        if len(looked_up) == len(products) == 1 and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta.setdefault("ac_graph_id", 0)
    return joint


def _only_in(reader: fx.Node, product: fx.Node) -> bool:
    return all(node is reader or is_view(node) for node in readers([product]))
