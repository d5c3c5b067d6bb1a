"""Segments on their way to another process, which compiles them into Inductor's cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxshard import _compat
from fxshard.log import LOG
from fxshard.remembered import graphs
from fxshard.remembered.canonical import Unnamed


def packed(segment: fx.GraphModule) -> bytes | None:
    """A graph for another process to compile; None if it cannot go there, or Inductor would not keep it."""
    if not _compat.is_cached(segment):
        return None
    try:
        return graphs.dumps({"segment": segment})
    except Unnamed as error:
        LOG.debug("a segment cannot be compiled ahead: %s", error)
        return None


def compile_packed(data: bytes, circumstances: Mapping[str, Any]) -> None:
    """Compile such a graph in this process, for Inductor's cache."""
    with _compat.under(circumstances):
        found, _ = graphs.loads(data)
        _compat.inductor_compile(found["segment"], example_inputs(found["segment"]))


def example_inputs(segment: fx.GraphModule) -> list[Any]:
    """Values like those that the segment is called with. Layers that were traced once share theirs: they get their own,
    or a compiler would take two inputs for the same memory.
    """
    values: list[Any] = []
    for node in segment.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        seen = isinstance(value, torch.Tensor) and any(value is other for other in values)
        values.append(_compat.another_like(value) if seen else value)
    return values
