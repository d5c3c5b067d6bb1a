"""Muon's matrices of which one data-parallel rank holds all rows: what it has to do, and which tensor-parallel parts
of them it exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from fxshard.plan.buckets import BucketPlan
from fxshard.plan.choice import crosses
from fxshard.plan.layout import TensorSpec, shares, within
from fxshard.plan.matrices import matrix_cost
from fxshard.plan.model_groups import ModelGroup
from fxshard.plan.parts import Part, Parts


def local_work(
    buckets: Iterable[BucketPlan],
    ranks: int,
    cost: Callable[[Sequence[int]], int] = matrix_cost,
    *,
    cut: bool = True,
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
            alone = (
                len(spec.shape) == 2 and bucket.layout.ranks > 1
            )  # a stack may be on several ranks, cut between them
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
        specs = {f.name: layout.slots[layout.index[f.name]].spec for f in own if f.name in counted and f.rows}
        totals.append(sum(cost(specs[f.name].shape) * f.rows / specs[f.name].rows for f in own if f.name in specs))
    return max(totals)


@dataclass(frozen=True)
class CutAlone:
    """The matrices of a bucket that are cut over tensor-parallel ranks, and of which one shard has all of a part."""

    bucket: BucketPlan
    group: ModelGroup
    matrices: tuple[tuple[TensorSpec, int], ...]
    """Of each the part, and the dimension along which it is cut."""


def cut_alone(buckets: Iterable[BucketPlan]) -> list[CutAlone]:
    """Those of some buckets; buckets that have none are left out."""
    found = []
    for bucket in buckets:
        if bucket.cuts is None:
            continue
        specs = [bucket.layout.slots[bucket.layout.index[whole.name]].spec for whole in bucket.cuts.wholes]
        alone = [spec for spec in specs if spec.numel and not crosses(bucket.layout, spec)]
        matrices = [(spec, dim) for spec in alone if (dim := bucket.cuts.dim(spec.name, spec.shape)) is not None]
        if matrices:
            found.append(CutAlone(bucket, bucket.cuts.group, tuple(matrices)))
    return found


def parts_alone(cut: Iterable[CutAlone], place: Callable[[BucketPlan], tuple[int, int]]) -> Parts | None:
    """What a rank exchanges with tensor-parallel ranks of the parts that it holds alone; None: nothing.

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
