"""Optimizer state over the replicas of a shard (HSDP): which of its rows each replica updates.

Every replica holds the same shard and the same gradient. Each updates a part of the rows, keeps the state of that part
alone, and gets the other parts from the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

from fxshard.plan.layout import Fragment, Layout


def shares(layout: Layout, shard: int, replicas: int, matrices: Collection[str] = ()) -> list[tuple[int, int]]:
    """The stretch of a shard that each replica updates: about equally long, cut between rows.

    ``matrices``, which are Muon's, are not cut: a replica orthogonalizes them whole. Stacks of them are cut between
    matrices, which are their rows.

    >>> from fxshard.plan.layout import Slot, TensorSpec
    >>> shares(Layout(2, 192, (Slot(TensorSpec("w", (6, 64)), 0),)), shard=0, replicas=2)
    [(0, 64), (64, 192)]
    """
    fragments = [fragment for fragment in layout.fragments(shard) if fragment.numel]
    cuts = [_cut(layout, fragments, layout.shard_numel * i // replicas, matrices) for i in range(1, replicas)]
    return list(pairwise([0, *cuts, layout.shard_numel]))


def _cut(layout: Layout, fragments: list[Fragment], wanted: int, matrices: Collection[str]) -> int:
    """The last place at or before ``wanted`` that cuts no row; of a matrix, the end that is nearer."""
    for fragment in fragments:
        if fragment.offset < wanted < fragment.offset + fragment.numel:
            spec = layout.slots[layout.index[fragment.name]].spec
            if fragment.name in matrices and len(spec.shape) == 2:
                return fragment.offset + (fragment.numel if 2 * (wanted - fragment.offset) > fragment.numel else 0)
            return fragment.offset + (wanted - fragment.offset) // spec.row_numel * spec.row_numel
    return wanted


def within(layout: Layout, fragment: Fragment, begin: int, end: int) -> Fragment:
    """The rows of a fragment that lie in a stretch of its shard; none of them, where none does."""
    start = min(max(fragment.offset, begin), end)
    stop = min(max(fragment.offset + fragment.numel, start), end)
    row = layout.slots[layout.index[fragment.name]].spec.row_numel
    if stop - start == fragment.numel:
        return fragment
    if stop <= start:
        return replace(fragment, row_stop=fragment.row_start, offset=start, numel=0)
    first = fragment.row_start + (start - fragment.offset) // row
    return Fragment(fragment.name, first, first + (stop - start) // row, start, stop - start)
