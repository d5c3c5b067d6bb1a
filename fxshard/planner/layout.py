"""Where each parameter sits in its bucket, and which rank owns which rows of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from fxshard._torch.errors import LayoutError

ALIGNMENT = 64
"""Every parameter starts at a multiple of this many elements: 128 bytes in bf16, what vector loads and TMA want."""

MOST_ELEMENTS = 2**56
"""Elements of one bucket at most: sizes in bytes then fit into 64 bits."""


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape of a parameter: all that a layout has to know about it."""

    name: str
    shape: tuple[int, ...]
    cut_rows: int = 1
    """Shard boundaries fall between groups of so many rows."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Elements of one row; a parameter with no elements still has rows of length one so that division works."""
        return max(1, math.prod(self.shape[1:]))

    @property
    def cut_numel(self) -> int:
        """Elements between two places at which a boundary may fall."""
        return self.cut_rows * self.row_numel


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the gathered bucket."""

    spec: TensorSpec
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.numel


@dataclass(frozen=True)
class Fragment:
    """The rows of one parameter that one rank holds, and where they lie in that rank's shard."""

    name: str
    row_start: int
    row_stop: int
    offset: int
    numel: int

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start


@dataclass(frozen=True)
class Layout:
    """The order of parameters in one flat buffer that is cut into ``ranks`` equally long shards.

    The gathered bucket is the concatenation of the shards, so a parameter is a plain view of it and a gather copies
    nothing. Owner, offset and rows of every fragment follow from the slots alone: optimizer, gradient reduction and
    checkpoint all ask this object and cannot disagree.
    """

    ranks: int
    shard_numel: int
    slots: tuple[Slot, ...]
    whole: bool = False

    def __post_init__(self) -> None:
        self._check()

    @property
    def numel(self) -> int:
        return self.ranks * self.shard_numel

    @property
    def padding(self) -> int:
        """Elements of the bucket that belong to no parameter."""
        return self.numel - sum(slot.spec.numel for slot in self.slots)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.spec.name for slot in self.slots)

    @cached_property
    def index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def spec(self, name: str) -> TensorSpec:
        return self.slots[self.index[name]].spec

    def fragment(self, rank: int, name: str) -> Fragment:
        """The part of ``name`` on ``rank``; zero rows where the rank holds none of it."""
        slot = self.slots[self.index[name]]
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        start, stop = max(slot.offset, begin), min(slot.end, end)
        row = slot.spec.row_numel
        if stop <= start:
            offset = min(max(slot.offset - begin, 0), self.shard_numel)
            if slot.spec.numel == 0 and rank == self.owner(name):  # (3, 0) has rows to hold, though no elements
                return Fragment(name, 0, slot.spec.rows, offset, 0)
            at_row = 0 if begin <= slot.offset else slot.spec.rows
            return Fragment(name, at_row, at_row, offset, 0)
        return Fragment(name, (start - slot.offset) // row, (stop - slot.offset) // row, start - begin, stop - start)

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        return tuple(self.fragment(rank, name) for name in self.names)

    def owner(self, name: str) -> int:
        """The rank whose shard holds the first element of ``name``; in a whole layout, all of it."""
        slot = self.slots[self.index[name]]
        return min(slot.offset // self.shard_numel, self.ranks - 1) if self.shard_numel else 0

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The stretches that no parameter covers, as (offset, numel)."""
        ends = [0, *(slot.end for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.numel]
        return tuple((end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)

    def _check(self) -> None:
        names = [slot.spec.name for slot in self.slots]
        doubled = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        if doubled:
            raise LayoutError(f"placed more than once: {sorted(doubled)}")
        if self.ranks < 1 or self.shard_numel < 0:
            raise LayoutError(f"{self.ranks} shards of {self.shard_numel} elements: expected one or more, of 0 or more")
        if self.numel > MOST_ELEMENTS:
            raise LayoutError(f"{self.ranks} shards of {self.shard_numel} elements are more than any memory holds")
        if self.shard_numel % ALIGNMENT:
            raise LayoutError(f"shard length {self.shard_numel} is not a multiple of {ALIGNMENT}")
        cursor = 0
        for slot in self.slots:
            if slot.spec.cut_rows < 1 or min(slot.spec.shape, default=0) < 0:
                raise LayoutError(f"{slot.spec.name} has shape {slot.spec.shape}, cut every {slot.spec.cut_rows} rows")
            if slot.offset % ALIGNMENT:
                raise LayoutError(f"{slot.spec.name} starts at {slot.offset}, not a multiple of {ALIGNMENT}")
            if slot.offset < cursor:
                raise LayoutError(f"{slot.spec.name} at {slot.offset} overlaps what ends at {cursor}")
            cursor = slot.end
            self._check_boundaries(slot)
        if cursor > self.numel:
            raise LayoutError(f"the last parameter ends at {cursor}, after the bucket's {self.numel} elements")

    def _check_boundaries(self, slot: Slot) -> None:
        """Boundaries inside a parameter fall between its rows: the first one does, and then all do that follow it at
        multiples of a row. There may be millions of them, in a file from outside."""
        first = (slot.offset // self.shard_numel + 1) * self.shard_numel if self.shard_numel else slot.end
        if first >= min(slot.end, self.numel):
            return
        if self.whole:
            raise LayoutError(f"{slot.spec.name} crosses the shard boundary at {first} of a whole layout")
        second = first + self.shard_numel
        for boundary in (first, second) if second < min(slot.end, self.numel) else (first,):
            if (boundary - slot.offset) % slot.spec.cut_numel:
                cut = "a row" if slot.spec.cut_rows == 1 else f"a group of {slot.spec.cut_rows} rows"
                raise LayoutError(f"the shard boundary at {boundary} cuts {cut} of {slot.spec.name} in two")


def require_all_placed(specs: Sequence[TensorSpec], layout: Layout) -> Layout:
    """Return ``layout`` if it places exactly ``specs``; otherwise say which are missing or foreign."""
    wanted, placed = {spec.name for spec in specs}, set(layout.names)
    if len(wanted) != len(specs):
        raise LayoutError("two parameters of one bucket have the same name")
    if wanted != placed:
        raise LayoutError(
            f"not placed: {sorted(wanted - placed)}; placed without being asked: {sorted(placed - wanted)}"
        )
    return layout


def aligned(numel: int, to: int = ALIGNMENT) -> int:
    """``numel`` rounded up to a multiple of ``to``."""
    return -(-numel // to) * to


def shares(layout: Layout, shard: int, replicas: int, matrices: Collection[str] = ()) -> list[tuple[int, int]]:
    """The stretch of a shard that each replica updates (HSDP): about equally long, cut between rows.

    Every replica holds the same shard and the same gradient. Each updates a part of the rows, keeps the state of that
    part alone, and gets the other parts from the others.

    ``matrices``, which are Muon's, are not cut: a replica orthogonalizes them whole. Stacks of them are cut between
    matrices, which are their rows.

    >>> from fxshard.planner.layout import Slot, TensorSpec
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
            spec = layout.spec(fragment.name)
            if fragment.name in matrices and len(spec.shape) == 2:
                return fragment.offset + (fragment.numel if 2 * (wanted - fragment.offset) > fragment.numel else 0)
            return fragment.offset + (wanted - fragment.offset) // spec.row_numel * spec.row_numel
    return wanted


def within(layout: Layout, fragment: Fragment, begin: int, end: int) -> Fragment:
    """The rows of a fragment that lie in a stretch of its shard; none of them, where none does."""
    start = min(max(fragment.offset, begin), end)
    stop = min(max(fragment.offset + fragment.numel, start), end)
    row = layout.spec(fragment.name).row_numel
    if stop - start == fragment.numel:
        return fragment
    if stop <= start:
        return replace(fragment, row_stop=fragment.row_start, offset=start, numel=0)
    first = fragment.row_start + (start - fragment.offset) // row
    return Fragment(fragment.name, first, first + (stop - start) // row, start, stop - start)
