"""Joint graph, under a memory budget: which saved values backward computes again, one kind after the other.

A kind is what one operator of one module makes, in all layers that have it: repeated layers are decided alike. To drop
a kind, every node between it and what is still saved is marked ``MUST_RECOMPUTE``. The kind that costs least time for
its bytes comes first. Random numbers, collectives, operators of the user's own and what the model itself says about
checkpointing are left alone, and so is a kind that would need itself from the layer before: a residual stream.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard._torch import private
from fxshard.passes.cuts import is_lookup
from fxshard.planner.cost import node_float8_flops, node_flops, node_traffic
from fxshard.planner.hardware import Hardware
from fxshard.schedule.activations import owned_bytes
from fxshard.schedule.aliases import is_view, readers, root_of
from fxshard.schedule.offloads import Recomputed

SMALL = 0.01
"""A kind with less than this share of all saved bytes is not worth a decision."""
_PURE = ("aten", "prims", "fxshard")
"""Whose operators give the same for the same whenever they run."""

Key = tuple[str, str, int]
"""A module, its numbers as ``*``; an operator; and which one of those in the module."""


@dataclass(frozen=True)
class Candidate:
    """A kind of saved values, and the nodes that must run again if it is dropped."""

    key: Key
    recomputed: Recomputed
    nodes: frozenset[str]

    @property
    def cost(self) -> float:
        """Seconds per byte."""
        return self.recomputed.seconds / self.recomputed.bytes


def candidates(joint: fx.Graph, saved: Collection[str], asked: Collection[str], machine: Hardware) -> list[Candidate]:
    """What can be dropped of ``saved``, the cheapest first. ``asked``: nodes whose saving the model itself decides."""
    # In the order of the graph: all ranks must come to the same.
    kept = dict.fromkeys(root_of(node) for node in joint.nodes if node.name in saved and node.op != "placeholder")
    total = sum(map(owned_bytes, kept))
    keys = _keys(joint)
    kinds: dict[Key, list[fx.Node]] = {}
    for each in kept:
        if (maker := maker_of(each)) in keys and not is_lookup(maker):  # whose table would be gathered once more
            kinds.setdefault(keys[maker], []).append(each)
    found: list[Candidate] = []
    for key, members in kinds.items():
        size = sum(map(owned_bytes, members))
        if size <= SMALL * total:
            continue
        nodes = _made_of(members, kept.keys() - set(members), asked)
        if nodes is not None:
            # Sorted, because sums of floats depend on the order.
            seconds = sum(sorted(_seconds(node, machine) for node in nodes if not _is_recomputed(node)))
            name = f"{key[0]} {key[1]}".strip()
            marks = frozenset(node.name for node in nodes)
            found.append(Candidate(key, Recomputed(name, len(members), size, seconds), marks))
    return sorted(found, key=lambda each: (each.cost, each.key))


def mark(joint: fx.Graph, names: Collection[str]) -> None:
    """``MUST_RECOMPUTE`` on nodes."""
    latest = max((node.meta.get("ac_graph_id", 0) for node in joint.nodes), default=0)
    for node in joint.nodes:
        if node.name in names:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = latest


def maker_of(root: fx.Node) -> fx.Node:
    """The operator whose result, or part of a result, a value is."""
    return root.all_input_nodes[0] if root.target is operator.getitem else root


def _keys(joint: fx.Graph) -> dict[fx.Node, Key]:
    count: dict[tuple[str, str], int] = {}
    found: dict[fx.Node, Key] = {}
    for node in joint.nodes:
        target = private.operator_of(node)
        if target is None:
            continue
        path, name = private.module_path(node), private.operator_name(target)
        number = count[path, name] = count.get((path, name), -1) + 1
        found[node] = module_kind(node), name, number if path else 0
    return found


def module_kind(node: fx.Node) -> str:
    """The module that a node is of, its numbers as ``*``. Without a module, what has one shape is one kind."""
    path = private.module_path(node)
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path) if path else _shape(node)


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def _made_of(members: Sequence[fx.Node], kept: Collection[fx.Node], asked: Collection[str]) -> set[fx.Node] | None:
    """What makes ``members`` of what is ``kept`` and of inputs; None where that must not, or cannot, run twice."""
    found: set[fx.Node] = set()
    makers = set(map(maker_of, members))
    for member in members:
        stack = [member]
        while stack:
            node = stack.pop()
            if maker_of(root_of(node)) in makers - {maker_of(member)}:
                return None  # the layer before would be computed again for this one, and so on
            if node in found:
                continue
            if node.name in asked or not _runs_twice(node):
                return None
            found.add(node)
            stack += [each for each in node.all_input_nodes if not _is_there(each, kept)]
    for node in [*found]:  # a view would be saved in place of what it is a view of
        found.update(view for view in readers([node]) if is_view(view) and root_of(view) in found)
        found.update(part for part in node.users if part.target is operator.getitem)
    return found


def _is_there(node: fx.Node, kept: Collection[fx.Node]) -> bool:
    root = root_of(node)
    return root in kept or root.op in ("placeholder", "get_attr")


def _runs_twice(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if node.meta.get("unbacked_bindings"):
        return False  # a number read from data is read once: shapes of later values are in terms of it
    target = private.operator_of(node)
    if target is None:
        return isinstance(node.meta.get("val"), torch.SymInt | int)
    saved = node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
    return target.namespace in _PURE and not (saved or private.is_random(target) or private.is_mutable(target))


def _is_recomputed(node: fx.Node) -> bool:
    return node.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE


def _seconds(node: fx.Node, machine: Hardware) -> float:
    if is_view(node) or node.target is operator.getitem:
        return 0.0
    value = node.meta.get("val")
    dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
    seconds = machine.compute_seconds(node_flops(node), node_traffic(node), dtype, node_float8_flops(node))
    return seconds if node_flops(node) else seconds - machine.launch_overhead  # pointwise nodes are fused
