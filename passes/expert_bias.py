"""Recognise a bias per expert: a row for each token, taken by the expert that the token went to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxshard.passes.calls import Product, argument, call, past_casts, shape, writes


@dataclass(frozen=True)
class Bias:
    """``values`` ``[experts, out]``, added by ``node`` to the result of ``product``."""

    values: fx.Node
    node: fx.Node
    product: fx.Node


def added_bias(node: Any, product: Callable[[Any], Product | None]) -> Bias | None:
    """The bias in ``product + bias[expert of each token]``, added out of place or into the product itself."""
    if not isinstance(node, fx.Node):
        return None
    adding = node if call(node) == "add" else next((user for user in node.users if _adds_into(user, node)), None)
    if adding is None:
        return None
    for target, rows in (adding.args[:2], adding.args[1::-1]):
        target = past_casts(target)
        found = product(target)
        if found is not None and isinstance(rows, fx.Node) and found.offsets is not None:
            values = _gathered(rows, found.offsets)
            if values is not None and shape(values)[-1] == shape(target)[-1]:
                return Bias(values, adding, target)
    return None


def _adds_into(user: fx.Node, node: fx.Node) -> bool:
    return call(user) == "add" and writes(user) is node


def _gathered(rows: fx.Node, offsets: fx.Node) -> fx.Node | None:
    """The ``[experts, out]`` tensor from which ``rows`` takes the row of each token's expert."""
    values: Any = None
    if call(rows) == "index" and isinstance(rows.args[1], fx.Node):
        values, experts = rows.args[0], rows.args[1]
        matches = _counted(offsets) is not None and _counted(offsets) is _ids(experts)
    elif call(rows) == "index_select" and argument(rows, 1, "dim") == 0:
        values = rows.args[0]
        matches = _counted(offsets) is not None and _counted(offsets) is _ids(argument(rows, 2, "index"))
    elif call(rows) == "repeat_interleave" and argument(rows, 2, "dim") == 0:
        values = rows.args[0]
        matches = _summed(offsets) is not None and _summed(offsets) is _ids(argument(rows, 1, "repeats"))
    else:
        return None
    return values if matches and len(shape(values)) == 2 else None


def _summed(offsets: fx.Node) -> Any:
    """The counts whose running sum the offsets are."""
    offsets = _ids(offsets)
    return _ids(offsets.args[0]) if call(offsets) == "cumsum" and argument(offsets, 1, "dim") == 0 else None


def _counted(offsets: fx.Node) -> Any:
    """The expert of each token, where the offsets come from counting those."""
    counts = _summed(offsets)
    return _ids(counts.args[0]) if call(counts) == "count" else None


def _ids(node: Any) -> Any:
    """Past casts of any kind: numbers of experts and of tokens are exact in all of them that occur."""
    while call(node) == "cast" or (isinstance(node, fx.Node) and node.op == "call_method" and node.target in _INTEGER):
        node = node.args[0]
    return node


_INTEGER = ("int", "long")
