"""Masks of rows that no expert takes, where every row has one: they mask nothing, and keep experts from being fused.

``transformers`` marks tokens for experts of other ranks by a number that no expert here has, and fills what grouped
products leave undefined with zeros. Without expert parallelism there are no such tokens: experts are chosen by
``topk``, whose indices are smaller than the number of scores. Where that shows from the graph, the mask is false
everywhere and filling by it is left out.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxshard.passes.calls import argument, call, changed_between, shape, value

_FILL = ("masked_fill", "masked_fill_", torch.masked_fill)
_AT_LEAST = (operator.ge, torch.ge, "ge", "__ge__")


def drop_sentinels(graph: fx.Graph) -> None:
    """Leave out ``masked_fill`` with a mask that is false everywhere."""
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or node.target not in _FILL or len(node.args) < 2:
            continue
        filled, mask = node.args[:2]
        in_place = node.target == "masked_fill_"
        if not isinstance(filled, fx.Node) or not isinstance(mask, fx.Node) or shape(filled) != shape(node):
            continue
        # The result is a copy: where something else has the original, either may be written to.
        if (in_place or len(filled.users) == 1) and _is_false(mask, node):
            node.replace_all_uses_with(filled)
            graph.erase_node(node)


def _is_false(mask: fx.Node, where: fx.Node) -> bool:
    """Whether every element of ``mask`` is false when ``where`` reads it."""
    chain = [mask]
    while call(chain[-1]) in ("reshape", "contiguous") or chain[-1].target in ("unsqueeze", torch.unsqueeze):
        source = chain[-1].args[0]
        if not isinstance(source, fx.Node):
            return False
        chain.append(source)
    compared = chain[-1]
    if compared.target not in _AT_LEAST or len(compared.args) != 2 or compared.kwargs:
        return False
    numbers, least = compared.args
    if not isinstance(numbers, fx.Node) or not isinstance(least, int) or isinstance(least, bool):
        return False
    made_from: list[fx.Node] = []
    bound = _bound(numbers, made_from)
    if bound is None or bound > least:
        return False
    unchanged = changed_between(made_from, min(made_from), compared) is None
    return unchanged and changed_between(chain, compared, where) is None


def _bound(node: Any, made_from: list[fx.Node]) -> int | None:
    """A number that all elements are smaller than. ``made_from`` gets the nodes that this was seen from."""
    if not isinstance(node, fx.Node):
        return None
    made_from.append(node)
    if call(node) in ("reshape", "contiguous"):
        return _bound(node.args[0], made_from)
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    source, index = node.args[0], node.args[1]
    several = source.meta.get("example_value")
    if not isinstance(several, tuple | list):  # some elements of a tensor
        return _bound(source, made_from) if value(source) is not None else None
    made_from.append(source)
    if source.target in (torch.sort, "sort") and index == 0:
        return _bound(source.args[0], made_from)
    if source.target in (torch.topk, "topk") and index == 1 and isinstance(source.args[0], fx.Node):
        scores, dim = shape(source.args[0]), argument(source, 2, "dim", -1)
        size = scores[dim] if isinstance(dim, int) and scores else None
        return size if isinstance(size, int) else None
    return None
