"""What a node costs: floating-point operations and bytes of device memory traffic."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxshard import _compat
from fxshard.ops import mm_into

_FLOPS = "fxshard_flops"
"""Key of ``node.meta``: several passes ask for the same node."""


def node_flops(node: fx.Node) -> int:
    """Operations of a node by torch's own formulas; 0 for what has none (it is bound by memory traffic)."""
    if _FLOPS not in node.meta:
        node.meta[_FLOPS] = _count_flops(node)
    return node.meta[_FLOPS]


def _count_flops(node: fx.Node) -> int:
    target = _compat.operator_of(node)
    if target is None:
        return 0
    if target is mm_into:
        a, b = (_value(arg) for arg in node.args[:2])
        return 2 * int(a.shape[0]) * int(a.shape[1]) * int(b.shape[1])
    attention = _CPU_ATTENTION.get(_compat.operator_name(target))
    if attention is not None:
        query, key = (_value(node.args[i]) for i in attention.operands)
        batch, heads, length, width = (int(size) for size in query.shape)
        return attention.products * 2 * batch * heads * length * int(key.shape[-2]) * width
    formula = flop_registry.get(target.overloadpacket)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


@dataclass(frozen=True)
class _Attention:
    """Where query and key stand among the arguments, and how many matrix products of their size there are."""

    operands: tuple[int, int]
    products: int


# torch has formulas for the CUDA kernels only.
_CPU_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": _Attention((0, 1), 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _Attention((1, 2), 5),
}


def node_traffic(node: fx.Node) -> int:
    """Bytes a kernel reads and writes, from shapes; of pointwise nodes, which are fused, only the output counts."""
    if node.op != "call_function" or node.target is operator.getitem:
        return 0
    written = _bytes(node.meta.get("val"))
    if node_flops(node) == 0:
        return written
    return written + sum(_bytes(arg.meta.get("val")) for arg in node.all_input_nodes)


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(math.prod(int(size) for size in value.shape)) * value.dtype.itemsize
    if isinstance(value, (tuple, list)):
        return sum(_bytes(item) for item in value)
    return 0
