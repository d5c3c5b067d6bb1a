"""Before autograd: a power of two that a product's result is multiplied by goes to the narrower of its operands.

Adapters compute ``scaling · (h Bᵀ)`` with a narrow ``h``: as written, each result and, in backward, each gradient of
one is read and written once more only to be scaled. ``(scaling · h) Bᵀ`` has the same bits, in both directions, as long
as nothing leaves the range of exponents: float16, whose range is small, is left alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxshard.passes.calls import argument, call, rewrite_nested, stand_in, switched_between, value, written
from fxshard.passes.context import PassContext

_WIDE_RANGE = (torch.bfloat16, torch.float32)


def scale_narrow(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return rewrite_nested(module, _rewrite)


def _rewrite(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if call(node) != "mul" or len(node.args) != 2 or node.kwargs or written(node):
            continue
        product, factor = sorted(node.args, key=lambda arg: not isinstance(arg, fx.Node))
        if _is_power_of_two(factor) and _is_widening(product, node):
            narrow, weight = product.args[0], argument(product, 1, "weight")
            with graph.inserting_before(product):
                scaled = graph.call_function(torch.mul, (narrow, factor))
                again = graph.call_function(F.linear, (scaled, weight))
            for new, old in ((scaled, narrow), (again, node)):
                stand_in(new, old)
                new.meta["example_value"] = value(old)
            node.replace_all_uses_with(again)
            graph.erase_node(node)
            graph.erase_node(product)


def _is_power_of_two(number: Any) -> bool:
    return isinstance(number, (int, float)) and abs(math.frexp(number)[0]) == 0.5


def _is_widening(product: Any, scaled: fx.Node) -> bool:
    """Whether a node is a linear layer without bias, wider than its input, whose result is only scaled."""
    if call(product) != "linear" or len(product.users) != 1 or argument(product, 2, "bias") is not None:
        return False
    given, out, kept = value(product.args[0]), value(product), value(scaled)
    if given is None or out is None or kept is None or given.shape[-1] >= out.shape[-1]:
        return False
    return not switched_between(product, scaled) and given.dtype == out.dtype == kept.dtype and out.dtype in _WIDE_RANGE
