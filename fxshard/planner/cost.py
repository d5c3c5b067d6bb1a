"""The cost of a node: floating-point operations and bytes of device memory traffic."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from fxshard._torch import private
from fxshard.kernels.float8_grouped import float8_grouped_mm
from fxshard.kernels.float8_ops import float8_mm, float8_mm_into
from fxshard.kernels.ops import mm_into
from fxshard.kernels.te_mlp_op import te_mlp_backward, te_mlp_forward, te_mlp_wgrad

FLOPS, TRAFFIC = "fxshard_flops", "fxshard_traffic"
"""Keys of ``node.meta``: several passes ask for the same node."""


def node_flops(node: fx.Node) -> int:
    """Operations of a node by torch's own formulas; 0 for what has none (it is bound by memory traffic)."""
    if FLOPS not in node.meta:
        node.meta[FLOPS] = _count_flops(node)
    return node.meta[FLOPS]


def _count_flops(node: fx.Node) -> int:
    target = private.operator_of(node)
    if target is None:
        return 0
    if target is mm_into:
        a, b = (_value(arg) for arg in node.args[:2])
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    attention = _ATTENTION.get(private.operator_name(target))
    if attention is not None:
        operands, products = attention
        query, key = (_value(node.args[i]) for i in operands)
        batch, heads, length, width = query.shape
        return products * 2 * batch * heads * length * key.shape[-2] * width
    formula = flop_registry.get(target.overloadpacket)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
    return int(formula(*args, **kwargs, out_val=_value(node)))


_IN_FLOAT8 = (float8_mm, float8_mm_into, float8_grouped_mm, te_mlp_forward, te_mlp_backward, te_mlp_wgrad)


def node_float8_flops(node: fx.Node) -> int:
    """Operations of products in float8, and of Transformer Engine's in MXFP8, which only devices with them run."""
    return node_flops(node) if node.target in _IN_FLOAT8 else 0


# Where query and key stand among the arguments, and how many matrix products of their size there are: torch's formulas
# know no CPU kernels, and in torch 2.11 they refuse keys with fewer heads than queries.
_ATTENTION = {
    f"_scaled_dot_product_{kind}{direction}": cost
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for direction, cost in (("", ((0, 1), 2)), ("_backward", ((1, 2), 5)))
}


def node_traffic(node: fx.Node) -> int:
    """Bytes a kernel reads and writes, from shapes; of pointwise nodes, which are fused, only the output counts."""
    if TRAFFIC not in node.meta:
        node.meta[TRAFFIC] = _count_traffic(node)
    return node.meta[TRAFFIC]


def _count_traffic(node: fx.Node) -> int:
    if node.op != "call_function" or node.target is operator.getitem:
        return 0
    written = tensor_bytes(node.meta.get("val"))
    if node_flops(node) == 0:
        return written
    return written + sum(tensor_bytes(arg.meta.get("val")) for arg in node.all_input_nodes)


def _value(node: Any) -> Any:
    """The value of a node; sizes that may vary have the value they were traced with.

    Asking a symbolic size for its value would fix it: the graph would then serve this one size only.
    """
    value = node.meta.get("val") if isinstance(node, fx.Node) else node
    return tree_map_only((torch.Tensor, torch.SymInt), _as_traced, value)


def _as_traced(value: torch.Tensor | torch.SymInt) -> Any:
    if isinstance(value, torch.SymInt):
        return private.size_hint(value)
    if all(isinstance(size, int) for size in value.shape):
        return value
    return torch.empty([private.size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in a list."""
    if isinstance(value, torch.Tensor):
        return math.prod(private.size_hint(size) for size in value.shape) * value.dtype.itemsize
    if isinstance(value, (tuple, list)):
        return sum(tensor_bytes(item) for item in value)
    return 0
