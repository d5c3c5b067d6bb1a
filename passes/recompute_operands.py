"""Joint graph: what weight gradients multiply is made again in backward, where what it is made of is saved anyway.

The output of a norm, or of an activation, is an operand of a product, and the gradient of that product's weight needs
it once more. The norm's or activation's own gradient needs its input. torch saves both: an operand that is made again
has to be written again, which its partitioner never does. That is one pass over a tensor; the saved copy lives from
forward to backward in every layer. Provides ``MUST_RECOMPUTE`` on the elementwise nodes between such an operand and
what backward reads of its making; what the model itself says about a node stands.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard._torch import private
from fxshard.passes.context import PassContext
from fxshard.passes.cuts import is_heavy
from fxshard.schedule.aliases import is_view, readers

SMALL = 8
"""What has at most this fraction of a tensor's elements costs nothing to save: one number a row, or one a column."""
_CASTS = {torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default}


def recompute_operands(joint: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    gradients = _of_gradients(joint.graph)
    latest = max((node.meta.get("ac_graph_id", 0) for node in joint.graph.nodes), default=0)
    for node in joint.graph.nodes:
        if node in gradients or not _is_elementwise(node):
            continue
        read_by = readers([node])
        goes_on = any(reader not in gradients and _is_elementwise(reader) for reader in read_by)  # a residual stream
        if not goes_on and any(reader in gradients and is_heavy(reader) for reader in read_by):
            for each in _made_again(node, gradients):
                each.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                each.meta["ac_graph_id"] = latest
    return joint


def _of_gradients(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _is_elementwise(node: fx.Node) -> bool:
    target = private.operator_of(node)
    return target is not None and (target in _CASTS or torch.Tag.pointwise in target.tags)


def _made_again(operand: fx.Node, gradients: set[fx.Node]) -> list[fx.Node]:
    """The nodes that make ``operand`` of what backward reads in any case; none if something else is needed, too."""
    found: dict[fx.Node, None] = {}
    stack = [operand]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if node.op == "placeholder" or (node is not operand and _is_read(node, operand, gradients)):
            continue  # an input of the graph, or what is saved anyway
        if is_view(node):
            stack.append(node.all_input_nodes[0])
            continue
        if not _is_elementwise(node) or "recompute" in node.meta:
            return []
        found[node] = None
        stack += [source for source in node.all_input_nodes if not _is_small(source, operand)]
    return list(found)


def _is_read(node: fx.Node, operand: fx.Node, gradients: set[fx.Node]) -> bool:
    """Whether backward reads ``node``, or what is computed element by element from it alone, but not ``operand``."""
    derived = {node}
    while True:
        found = {reader for reader in readers(derived) if reader is not operand and reader not in derived}
        if found & gradients:
            return True
        found = {reader for reader in found if is_view(reader) or _is_made_of(reader, derived)}
        if not found:
            return False
        derived |= found


def _is_made_of(node: fx.Node, sources: set[fx.Node]) -> bool:
    return _is_elementwise(node) and all(
        source in sources or _is_small(source, node) for source in node.all_input_nodes
    )


def _is_small(source: fx.Node, node: fx.Node) -> bool:
    few, many = source.meta.get("val"), node.meta.get("val")
    if not isinstance(few, torch.Tensor) or not isinstance(many, torch.Tensor):
        return True  # a number
    # As traced: a comparison of open sizes would close them, and of sizes that depend on data fail.
    few_elements, many_elements = (math.prod(map(private.size_hint, value.shape)) for value in (few, many))
    return few_elements * SMALL <= many_elements
