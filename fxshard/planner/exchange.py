"""Row layouts under Muon: which matrices travel, to which ranks, and in which batches; what a rank has to do with those
of which it holds all rows, and which tensor-parallel parts of them it exchanges.

Fixed when the model is sharded, from layouts alone: every rank makes the same plan, and a step exchanges no metadata.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.choice import crosses
from fxshard.planner.layout import TensorSpec, shares, within
from fxshard.planner.matrices import least_loaded, matrix_cost
from fxshard.planner.model_groups import ModelGroup
from fxshard.planner.parts import Part, Parts
from fxshard.planner.state import row_numel
from fxshard.planner.tuning import BATCH_BYTES


def local_work(
    buckets: Iterable[BucketPlan], ranks: int, cost: Callable[[Sequence[int]], int] = matrix_cost, *, cut: bool = True
) -> list[dict[int, float]]:
    """{bucket: work} for each rank: matrices, and the matrices of stacks, that it holds alone. ``cut``: whether those
    count that tensor-parallel ranks have parts of."""
    work: list[dict[int, float]] = [{} for _ in range(ranks)]
    for bucket in buckets:
        counted = {*bucket.matrices} - ({*bucket.cuts.whole} if bucket.cuts is not None and not cut else set())
        for slot in bucket.layout.slots:
            spec = slot.spec
            if spec.name not in counted or crosses(bucket.layout, spec) or not spec.numel:
                continue
            # A stack may be on several ranks, cut between its matrices.
            alone = len(spec.shape) == 2 and bucket.layout.ranks > 1
            first, step = (bucket.layout.owner(spec.name), bucket.layout.ranks) if alone else (0, 1)
            for rank in range(first, ranks, step):
                # Groups may be smaller than the largest: what one of them holds, the others hold as well.
                rows = bucket.layout.fragment(rank % bucket.layout.ranks, spec.name).rows
                if rows:
                    done = work[rank].get(bucket.index, 0.0)
                    work[rank][bucket.index] = done + cost(spec.shape) * rows / spec.rows
        if bucket.shares_state:
            for rank in range(ranks):
                if bucket.index in work[rank]:
                    work[rank][bucket.index] = _of_busiest_replica(bucket, rank % bucket.layout.ranks, cost, counted)
    return work


def _of_busiest_replica(
    bucket: BucketPlan, shard: int, cost: Callable[[Sequence[int]], int], counted: Collection[str]
) -> float:
    """Work on a shard whose replicas have a part of it each: that of the one with most."""
    layout = bucket.layout
    totals = []
    for begin, end in shares(layout, shard, bucket.domain.replicas, bucket.matrices):
        own = [within(layout, fragment, begin, end) for fragment in layout.fragments(shard)]
        specs = {f.name: layout.spec(f.name) for f in own if f.name in counted and f.rows}
        totals.append(sum(cost(specs[f.name].shape) * f.rows / specs[f.name].rows for f in own if f.name in specs))
    return max(totals)


@dataclass(frozen=True)
class CutAlone:
    """The matrices of a bucket that are cut over tensor-parallel ranks, and of which one shard has all of a part."""

    bucket: BucketPlan
    group: ModelGroup
    matrices: tuple[tuple[TensorSpec, int], ...]
    """For each its part, and the dimension along which it is cut."""


def cut_alone(buckets: Iterable[BucketPlan]) -> list[CutAlone]:
    """The matrices of some buckets that are cut and held alone; buckets without any are left out."""
    found = []
    for bucket in buckets:
        if bucket.cuts is None:
            continue
        specs = [bucket.layout.spec(whole.name) for whole in bucket.cuts.wholes]
        alone = [spec for spec in specs if spec.numel and not crosses(bucket.layout, spec)]
        matrices = [(spec, dim) for spec in alone if (dim := bucket.cuts.dim(spec.name, spec.shape)) is not None]
        if matrices:
            found.append(CutAlone(bucket, bucket.cuts.group, tuple(matrices)))
    return found


def parts_alone(cut: Iterable[CutAlone], place: Callable[[BucketPlan], tuple[int, int]]) -> Parts | None:
    """The parts that a rank holds alone and exchanges with tensor-parallel ranks; None: there are none.

    ``place``: the shard of a bucket that it holds, and which of its replicas that is.
    """
    members: list[Part] = []
    group: ModelGroup | None = None
    for each in cut:
        bucket, layout = each.bucket, each.bucket.layout
        shard, replica = place(bucket)
        own = shares(layout, shard, bucket.domain.replicas, bucket.matrices)[replica] if bucket.shares_state else None
        for spec, dim in each.matrices:
            if len(spec.shape) == 2 and layout.owner(spec.name) != shard:
                continue
            fragment = layout.fragment(shard, spec.name)
            if own is not None:
                fragment = within(layout, fragment, *own)
            if fragment.numel:
                members.append(Part(spec.name, (fragment.rows, *spec.shape[1:]), dim))
                group = each.group
    return Parts(group, tuple(members)) if group is not None else None


SENT_ITEMSIZE = 4
"""Matrices travel in fp32: an owner that normalises what was rounded before would compute something else."""
ROW_HALVES = 4
"""Numbers of 16 bits that hold what comes back for a row under NorMuon: two in fp32."""


@dataclass(frozen=True)
class Travel:
    """A matrix that lies on several ranks, and the one that orthogonalizes it."""

    bucket: int
    name: str
    shape: tuple[int, ...]
    owner: int
    parts: tuple[tuple[int, int], ...]
    """(rank, elements) of the ranks that hold rows of it, in the order of the rows."""
    row_moments: bool = False
    """Whether the second moments of its rows travel with them (NorMuon)."""
    cut: int | None = None
    """The dimension along which tensor-parallel ranks have parts of it; what travels is the part of one of them."""

    def there(self, numel: int) -> int:
        """Numbers in fp32 that go to the owner with that many elements: they, and a second moment for each row."""
        return numel + (row_numel(numel, self.shape) if self.row_moments else 0)

    def back(self, numel: int) -> int:
        """Numbers in bf16 that come back: elements, and two in fp32 for each row, its factor and its second moment."""
        return numel + (ROW_HALVES * row_numel(numel, self.shape) if self.row_moments else 0)


@dataclass(frozen=True)
class Batch:
    """Matrices that travel together: one all-to-all to their owners, one back.

    With a ``tensor`` group all of them are cut over it: between the two, owners exchange parts with the ranks of that
    group that own the other parts of the same matrices.
    """

    ranks: int
    travels: tuple[Travel, ...]
    tensor: ModelGroup | None = None

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(travel.bucket for travel in self.travels))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(travel.name for travel in self.travels)

    @property
    def numel(self) -> int:
        return sum(numel for travel in self.travels for _, numel in travel.parts)

    def parts(self, rank: int) -> Parts | None:
        """The parts that owner ``rank`` exchanges with owners of the other parts of its matrices; None: no parts."""
        owned = [travel for travel in self.travels if travel.owner == rank and travel.cut is not None]
        if self.tensor is None or not owned:
            return None
        return Parts(self.tensor, tuple(Part(each.name, each.shape, each.cut or 0) for each in owned))

    def sent(self, *, back: bool = False) -> int:
        """Numbers that travel to owners, or back from them."""
        return sum(_numbers(travel, numel, back) for travel in self.travels for _, numel in travel.parts)

    def elements(self, holder: int, owner: int, *, back: bool = False) -> int:
        """Numbers of this batch that go from one rank to another, or come back."""
        own = (travel for travel in self.travels if travel.owner == owner)
        return sum(_numbers(travel, n, back) for travel in own for rank, n in travel.parts if rank == holder)

    def to_owners(self, rank: int, *, back: bool = False) -> list[int]:
        """Numbers that ``rank`` sends to each rank: its rows of what the other owns."""
        return [self.elements(rank, owner, back=back) for owner in range(self.ranks)]

    def from_holders(self, rank: int, *, back: bool = False) -> list[int]:
        """Numbers that ``rank`` gets from each rank: their rows of what it owns."""
        return [self.elements(holder, rank, back=back) for holder in range(self.ranks)]


def _numbers(travel: Travel, numel: int, back: bool) -> int:
    return travel.back(numel) if back else travel.there(numel)


def plan_exchange(buckets: Sequence[BucketPlan], limit: int = BATCH_BYTES) -> tuple[Batch, ...]:
    """Batches in the order in which the next forward needs the buckets."""
    sharded = [bucket for bucket in reversed(buckets) if bucket.layout.ranks > 1]
    batches: list[Batch] = []
    for domain in dict.fromkeys(bucket.domain for bucket in sharded):
        together = [bucket for bucket in sharded if bucket.domain == domain]
        ranks = together[0].layout.ranks
        travels = _with_owners(together, ranks)
        group = next((bucket.cuts.group for bucket in together if bucket.cuts is not None), None)
        batches += _batches([travel for travel in travels if travel.cut is not None], ranks, limit, group)
        batches += _batches([travel for travel in travels if travel.cut is None], ranks, limit)
    return tuple(batches)


def _with_owners(buckets: Sequence[BucketPlan], ranks: int) -> list[Travel]:
    """Every matrix that travels, in the order of the buckets.

    The largest matrix goes first, always to the rank with the least work; what a rank holds alone counts first.
    """
    work = [sum(alone.values()) for alone in local_work(buckets, ranks)]
    crossing = [
        (bucket, slot.spec)
        for bucket in buckets
        for slot in bucket.layout.slots
        if slot.spec.name in bucket.matrices and crosses(bucket.layout, slot.spec)
    ]
    owners: dict[str, int] = {}
    for _, spec in sorted(crossing, key=lambda entry: -matrix_cost(entry[1].shape)):
        owners[spec.name] = least_loaded(work)
        work[owners[spec.name]] += matrix_cost(spec.shape)
    travels = []
    for bucket, spec in crossing:
        parts = [(rank, bucket.layout.fragment(rank, spec.name).numel) for rank in range(ranks)]
        held = tuple((rank, numel) for rank, numel in parts if numel)
        cut = bucket.cuts.dim(spec.name, spec.shape) if bucket.cuts and spec.name in bucket.cuts.whole else None
        travels.append(Travel(bucket.index, spec.name, spec.shape, owners[spec.name], held, bucket.row_moments, cut))
    return travels


def _batches(travels: Sequence[Travel], ranks: int, limit: int, tensor: ModelGroup | None = None) -> list[Batch]:
    batches: list[Batch] = []
    current: list[Travel] = []
    received = [0] * ranks
    for travel in travels:
        size = math.prod(travel.shape) * SENT_ITEMSIZE
        if current and received[travel.owner] + size > limit:
            batches.append(Batch(ranks, tuple(current), tensor))
            current, received = [], [0] * ranks
        current.append(travel)
        received[travel.owner] += size
    if current:
        batches.append(Batch(ranks, tuple(current), tensor))
    return batches
