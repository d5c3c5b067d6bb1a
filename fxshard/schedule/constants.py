"""Values that are made from nothing: zeros to add to, positions, masks of a fixed shape."""

from __future__ import annotations

import torch
from torch import fx

from fxshard._torch import private
from fxshard.schedule.aliases import readers

_PURE = ("aten", "prims")
"""Whose operators are known to make the same of the same numbers. One of a user's may read a file, count its calls, or
draw random numbers without saying so: it runs as often as the model calls it."""


def is_constant(node: fx.Node) -> bool:
    """Whether a node makes the same tensor whenever it runs, from sizes and numbers alone, and no node writes to it.

    To make one again costs less than to keep it: torch merges those of all layers into one, which would live from the
    first layer to the last, and be an input of all of them but one.
    """
    target = private.operator_of(node)
    if target is None or target.namespace not in _PURE or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if not all(isinstance(source.meta.get("val"), torch.SymInt | int) for source in node.all_input_nodes):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not any(map(_writes, readers([node])))


def _writes(node: fx.Node) -> bool:
    target = private.operator_of(node)
    return target is not None and private.is_mutable(target)
