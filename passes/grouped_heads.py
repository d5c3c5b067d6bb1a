"""Heads of keys and values before they were repeated for groups of query heads, where attention can take them so."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxshard._torch import private
from fxshard.passes.calls import argument, call, changed_between, named_shape, named_sizes, shape, value

WIDEST_HEAD = 256
"""Of those that torch's flash attention takes."""


def heads_before_repetition(
    node: fx.Node, query: fx.Node, key: fx.Node, values: fx.Node
) -> tuple[fx.Node, fx.Node] | None:
    """Key and value before their heads were repeated, where both were and attention can be asked to take them so.

    Of torch's kernels for CUDA those of flash attention and cuDNN do, in half precision: that is for the caller to see.
    """
    keys_of, values_of = _repeated(key, node), _repeated(values, node)
    if keys_of is None or values_of is None:
        return None
    q, k, v = value(query), value(keys_of), value(values_of)
    assert q is not None and k is not None and v is not None
    if q.dim() != 4 or not q.shape[1] == shape(key)[1] == shape(values)[1]:
        return None
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.shape[-1] > WIDEST_HEAD:
        return None
    if any(private.chooses_attention(other) for other in node.graph.nodes):
        return None
    return keys_of, values_of


def _repeated(node: Any, attention: fx.Node) -> fx.Node | None:
    """The heads [b, kv, s, d] that ``node`` [b, kv · n, s, d] repeats, each n times in a row; None if it does not."""
    chain = _repetition(node)
    source = chain[-1] if chain else None
    before, after = value(source), value(node)
    if before is None or after is None or before.dim() != 4:
        return None
    if not private.is_plain(before) or before.requires_grad != after.requires_grad:
        return None
    if len(chain) == 4:  # reshaped, expanded, with a dimension of one: none of them moves an element, so shapes decide
        batch, heads, *rest = named_sizes(before.shape)
        if not isinstance(heads, int) or not isinstance(repeated := named_shape(node)[1], int):
            return None
        n = repeated // heads
        sizes = [(batch, heads * n, *rest), (batch, heads, n, *rest), (batch, heads, 1, *rest)]
        if [named_shape(each) for each in chain[:3]] != sizes:
            return None
    return source if changed_between(chain, chain[-2], attention) is None else None


def _repetition(node: Any) -> list[fx.Node]:
    """The nodes from a tensor of repeated heads to what it repeats, both included."""
    if call(node) == "repeat_interleave" and isinstance(argument(node, 1, "repeats"), int):
        return [node, node.args[0]] if argument(node, 2, "dim") in (1, -3) else []
    expanded = node.args[0] if call(node) == "reshape" else None
    if not isinstance(expanded, fx.Node) or expanded.target != "expand":
        return []
    apart: Any = expanded.args[0]
    if not isinstance(apart, fx.Node) or not (apart.target in ("unsqueeze", torch.unsqueeze) or _adds_dimension(apart)):
        return []
    source = apart.args[0]
    return [node, expanded, apart, source] if isinstance(source, fx.Node) else []


def _adds_dimension(node: fx.Node) -> bool:
    """``x[:, :, None]``."""
    index = node.args[1] if node.target is operator.getitem else None
    if not isinstance(index, tuple):
        return False
    return all(each is None or each is Ellipsis or each == slice(None) for each in index)


def erase_repetition(repeated: Iterable[fx.Node], heads: Iterable[fx.Node]) -> None:
    for first, source in zip(repeated, heads, strict=True):
        for node in _repetition(first):
            if node is not source and not node.users:
                node.graph.erase_node(node)
