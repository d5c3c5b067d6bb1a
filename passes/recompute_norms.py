"""Joint graph: what products read of a norm is made again in backward, from what the norm's own gradient needs anyway.

A norm's output is a scaled copy of its input: ``x · rsqrt(mean(x²)) · weight``. Backward needs it for the gradients of
the weights that it is multiplied by, and it needs ``x`` and the scale for the gradient of the norm. torch saves all
three, because a product's operand has to be written once more if it is made again. That is one pass over one tensor;
the saved copy lives from forward to backward in every layer. Provides ``MUST_RECOMPUTE`` on such copies; what the model
itself says about a node stands.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard._torch import private
from fxshard.passes.context import PassContext
from fxshard.passes.cuts import is_heavy
from fxshard.schedule.aliases import is_view
from fxshard.schedule.params import PARAM

_aten = torch.ops.aten
_SCALES = {_aten.mul.Tensor, _aten.div.Tensor, _aten.sub.Tensor, _aten.add.Tensor, _aten._to_copy.default}
SMALL = 8
"""What has at most this fraction of a tensor's elements is a scale of it: one number a row, or one a column."""


def recompute_norms(joint: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    gradients = _from_gradients(joint.graph)
    latest = max((node.meta.get("ac_graph_id", 0) for node in joint.graph.nodes), default=0)
    for product in joint.graph.nodes:
        if product in gradients or not is_heavy(product):
            continue
        for operand in product.all_input_nodes:
            for node in _scaled_copy(operand):
                if "recompute" not in node.meta:
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                    node.meta["ac_graph_id"] = latest
    return joint


def _from_gradients(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _scaled_copy(operand: fx.Node) -> list[fx.Node]:
    """The nodes between a norm's input and ``operand``; none if it is not the output of one."""
    chain: list[fx.Node] = []
    scales: set[fx.Node] = set()
    node = operand
    while True:
        if is_view(node):
            node = node.all_input_nodes[0]
            continue
        large = [source for source in node.all_input_nodes if not _is_small(source, node)]
        if private.operator_of(node) not in _SCALES or len(large) != 1:
            break
        chain.append(node)
        scales.update(source for source in node.all_input_nodes if source not in large)
        node = large[0]
    return chain if any(_depends(scale, node) for scale in scales) else []


def _is_small(source: fx.Node, node: fx.Node) -> bool:
    few, many = source.meta.get("val"), node.meta.get("val")
    if not isinstance(few, torch.Tensor) or not isinstance(many, torch.Tensor):
        return False
    return few.numel() * SMALL <= many.numel()


def _depends(scale: fx.Node, source: fx.Node, steps: int = 16) -> bool:
    """Whether a scale was made of the tensor that it scales, in a few steps."""
    seen: set[fx.Node] = set()
    stack = [(scale, 0)]
    while stack:
        node, depth = stack.pop()
        if node is source:
            return True
        if node in seen or depth == steps or node.meta.get(PARAM) is not None:
            continue
        seen.add(node)
        stack += [(each, depth + 1) for each in node.all_input_nodes]
    return False
