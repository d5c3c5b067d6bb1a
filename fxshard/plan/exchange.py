"""Row layouts under Muon: which matrices travel, to which ranks, and in which batches.

Fixed when the model is sharded, from layouts alone: every rank makes the same plan, and a step exchanges no metadata.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxshard.plan.buckets import BucketPlan
from fxshard.plan.choice import crosses
from fxshard.plan.matrices import least_loaded, matrix_cost
from fxshard.plan.shares import shares, within
from fxshard.plan.state import row_numel
from fxshard.plan.tuning import BATCH_BYTES

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
    """Whether the second moments of its rows travel beside them (NorMuon)."""

    def there(self, numel: int) -> int:
        """Numbers in fp32 that go to the owner with that many elements: they, and a second moment for each row."""
        return numel + (row_numel(numel, self.shape) if self.row_moments else 0)

    def back(self, numel: int) -> int:
        """Numbers in bf16 that come back: elements, and two in fp32 for each row, its factor and its second moment."""
        return numel + (ROW_HALVES * row_numel(numel, self.shape) if self.row_moments else 0)


@dataclass(frozen=True)
class Batch:
    """Matrices that travel together: one all-to-all to their owners, one back."""

    ranks: int
    travels: tuple[Travel, ...]

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(travel.bucket for travel in self.travels))

    @property
    def numel(self) -> int:
        return sum(numel for travel in self.travels for _, numel in travel.parts)

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
        batches += _batches(_with_owners(together, ranks), ranks, limit)
    return tuple(batches)


def local_work(
    buckets: Iterable[BucketPlan], ranks: int, cost: Callable[[Sequence[int]], int] = matrix_cost
) -> list[dict[int, float]]:
    """{bucket: work} for each rank: matrices, and the matrices of stacks, that it holds alone."""
    work: list[dict[int, float]] = [{} for _ in range(ranks)]
    for bucket in buckets:
        for slot in bucket.layout.slots:
            spec = slot.spec
            if spec.name not in bucket.matrices or crosses(bucket.layout, spec) or not spec.numel:
                continue
            for rank in range(ranks):
                # Groups may be smaller than the largest: what one of them holds, the others hold as well.
                rows = bucket.layout.fragment(rank % bucket.layout.ranks, spec.name).rows
                if rows:
                    done = work[rank].get(bucket.index, 0.0)
                    work[rank][bucket.index] = done + cost(spec.shape) * rows / spec.rows
        if bucket.shares_state:
            for rank in range(ranks):
                if bucket.index in work[rank]:
                    work[rank][bucket.index] = _of_busiest_replica(bucket, rank % bucket.layout.ranks, cost)
    return work


def _of_busiest_replica(bucket: BucketPlan, shard: int, cost: Callable[[Sequence[int]], int]) -> float:
    """Work on a shard whose replicas have a part of it each: that of the one with most."""
    layout = bucket.layout
    totals = []
    for begin, end in shares(layout, shard, bucket.domain.replicas, bucket.matrices):
        own = [within(layout, fragment, begin, end) for fragment in layout.fragments(shard)]
        specs = {f.name: layout.slots[layout.index[f.name]].spec for f in own if f.name in bucket.matrices and f.rows}
        totals.append(sum(cost(specs[f.name].shape) * f.rows / specs[f.name].rows for f in own if f.name in specs))
    return max(totals)


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
        travels.append(Travel(bucket.index, spec.name, spec.shape, owners[spec.name], held, bucket.row_moments))
    return travels


def _batches(travels: Sequence[Travel], ranks: int, limit: int) -> list[Batch]:
    batches: list[Batch] = []
    current: list[Travel] = []
    received = [0] * ranks
    for travel in travels:
        size = math.prod(travel.shape) * SENT_ITEMSIZE
        if current and received[travel.owner] + size > limit:
            batches.append(Batch(ranks, tuple(current)))
            current, received = [], [0] * ranks
        current.append(travel)
        received[travel.owner] += size
    if current:
        batches.append(Batch(ranks, tuple(current)))
    return batches
