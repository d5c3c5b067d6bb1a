"""Process groups that a model communicates in itself: how a schedule names them, and where their ranks lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxshard.planner.collectives import (
    BETWEEN,
    INSIDE,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
)
from fxshard.planner.hardware import Hardware


@dataclass(frozen=True)
class ModelGroup:
    """One of them, as every rank of the model sees its own: its members differ from rank to rank, their number not."""

    label: str
    """The dimension of the mesh, ``tp``; with a number where two groups would be called the same."""
    ranks: int
    stride: int = 1
    """How many ranks apart neighbours are, which decides what they share a node with."""

    @property
    def name(self) -> str:
        """How a schedule calls it: ``tp×8``."""
        return f"{self.label}×{self.ranks}"

    def link(self, hardware: Hardware) -> str:
        """The links that bound its collectives: those inside a node, or those between nodes."""
        return INSIDE if self.ranks * self.stride <= hardware.ranks_per_node else BETWEEN

    def seconds(self, op: str, size: int, hardware: Hardware) -> float:
        """The time of a collective; ``size``: of the full buffer, as in :mod:`fxshard.planner.collectives`.

        What has no formula of its own (a broadcast) is taken for a gather.
        """
        for part, cost in COSTS.items():
            if part in op:
                return cost(size, self.ranks, hardware, stride=self.stride)
        return all_gather_seconds(size, self.ranks, hardware, stride=self.stride)


COSTS = {
    "all_reduce": all_reduce_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "all_to_all": all_to_all_seconds,
    "alltoall": all_to_all_seconds,
}
"""Part of an operator's name: what it costs."""


def labelled(found: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, ModelGroup]:
    """{a group's own name, which differs between ranks: what a schedule calls it}; ``found``: name, description and
    ranks of each, in the order in which the model uses them."""
    groups: dict[str, ModelGroup] = {}
    for name, description, ranks in found:
        if name in groups:
            continue
        label = {"": "group", "undefined": "group", "default_pg": "world"}.get(
            description, description.removeprefix("mesh_")
        )
        taken = {group.label for group in groups.values()}
        number = 2
        chosen = label
        while chosen in taken:
            chosen, number = f"{label}.{number}", number + 1
        spread = (max(ranks) - min(ranks)) // (len(ranks) - 1) if len(ranks) > 1 else 1
        groups[name] = ModelGroup(chosen, len(ranks), max(1, spread))
    return groups
