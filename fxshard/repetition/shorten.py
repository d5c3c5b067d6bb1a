"""Planning a deep model without tracing every layer through autograd.

What a step does to the layers of one ``ModuleList`` repeats. Where the captured graph repeats, node by node,
:func:`shorten` leaves four of the layers, and only these go through AOTAutograd, Inductor's joint passes and the
partitioner. :meth:`Shortened.expand` puts the others back, where the partitioner cannot be asked about four into the
joint graph. fxshard's own passes then work on the whole. Wherever something does not repeat exactly the answer is None,
and everything is traced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from fxshard import _compat
from fxshard.repetition.expansion import KEPT, Shortened
from fxshard.repetition.periods import Line, Member


def shorten(module: fx.GraphModule, names: Sequence[str | None]) -> Shortened | None:
    """The captured graph with four of its repeated layers; ``names`` are those of its inputs, None for data."""
    if _compat.constants(module):
        return None  # they would be inputs of the joint graph, ahead of those that have names
    inputs = module.graph.find_nodes(op="placeholder")
    members = _members(names)
    layers = 1 + max((member[0] for member in members if member is not None), default=-1)
    line = Line(module.graph, dict(zip(inputs, members, strict=True)))
    first = line.first_uses(range(layers))
    if layers < KEPT + 2 or first is None or not _repeats(line, first):
        return None
    removed = range(first[2], first[layers - 2])
    dropped = {node for node, member in line.member.items() if member and 2 <= member[0] < layers - 2}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(line.nodes):
        if position in removed or node in dropped:
            continue
        copies: dict[fx.Node, fx.Node] = {}
        for ref in node.all_input_nodes:
            left = _left_for(ref, line, first) if position >= removed.stop else ref
            if left is None:
                return None
            copies[ref] = env[left]
        env[node] = graph.node_copy(node, copies.__getitem__)
    kept = tuple(i for i, node in enumerate(inputs) if node not in dropped)
    short = _compat.graph_module(module, graph)
    return Shortened(short, kept, tuple(members), layers - KEPT)


def _left_for(ref: fx.Node, line: Line, first: list[int]) -> fx.Node | None:
    """What the end of the graph refers to once layers are gone; None if it reaches back by more than one layer."""
    layers, position = len(first), line.at[ref]
    member = line.member.get(ref)
    if member is not None:
        return ref if member[0] in (0, layers - 2, layers - 1) else None
    if ref.op == "placeholder" or position < first[1] or position >= first[layers - 2]:
        return ref
    if position < first[layers - 3]:
        return None
    return line.nodes[position - (layers - KEPT) * line.fw_period]


def _members(names: Sequence[str | None]) -> list[Member | None]:
    """Which inputs belong to which layer of the list that has most of them."""
    found = [re.fullmatch(r"(.*?)\b(\d+)\.(.*)", name) if name is not None else None for name in names]
    layers: dict[str, set[int]] = {}
    for match in found:
        if match is not None:
            layers.setdefault(match[1], set()).add(int(match[2]))
    if not layers:
        return [None] * len(names)
    longest = max(layers, key=lambda prefix: len(layers[prefix]))
    start = min(layers[longest])
    return [(int(match[2]) - start, match[3]) if match is not None and match[1] == longest else None for match in found]


def _repeats(line: Line, first: list[int]) -> bool:
    """Whether all layers but the first and the last are the same, in parameters and in what is done with them."""
    layers = len(first)
    shapes: list[dict[str, Any]] = [{} for _ in range(layers)]
    for node, member in line.member.items():
        if member is not None:
            value = node.meta.get("example_value")
            described = (value.shape, value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else None
            shapes[member[0]][member[1]] = described
    if any(list(a.items()) != list(b.items()) or None in a.values() for a, b in pairwise(shapes[1:-1])):
        return False
    line.fw_period = first[2] - first[1]
    if any(b - a != line.fw_period for a, b in pairwise(first[1:])):
        return False
    return all(line.equal(a, b, line.fw_period) for a, b in pairwise(first[1:-1]))
