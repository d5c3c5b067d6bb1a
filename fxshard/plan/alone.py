"""Muon's matrices of which one data-parallel rank holds all rows: what it has to do, and which tensor-parallel parts
of them it exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from fxshard.plan.buckets import BucketPlan
from fxshard.plan.choice import crosses
from fxshard.plan.layout import TensorSpec
from fxshard.plan.matrices import matrix_cost
from fxshard.plan.model_groups import ModelGroup
from fxshard.plan.parts import Part, Parts
from fxshard.plan.shares import shares, within


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
            for rank in range(ranks):
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


def parts_alone(buckets: Iterable[BucketPlan], place: Callable[[BucketPlan], tuple[int, int]]) -> Parts | None:
    """What a rank exchanges with tensor-parallel ranks of the parts of some buckets that it holds alone; None: nothing.

    ``place``: the shard of a bucket that it holds, and which of its replicas that is.
    """
    members: list[Part] = []
    group: ModelGroup | None = None
    for bucket in buckets:
        if bucket.cuts is None:
            continue
        shard, replica = place(bucket)
        layout = bucket.layout
        own = shares(layout, shard, bucket.domain.replicas, bucket.matrices)[replica] if bucket.shares_state else None
        for name, spec in cut_alone(bucket):
            fragment = layout.fragment(shard, name)
            if own is not None:
                fragment = within(layout, fragment, *own)
            dim = bucket.cuts.dim(name, spec.shape)
            if fragment.numel and dim is not None:
                members.append(Part(name, (fragment.rows, *spec.shape[1:]), dim))
                group = bucket.cuts.group
    return Parts(group, tuple(members)) if group is not None else None


def cut_alone(bucket: BucketPlan) -> list[tuple[str, TensorSpec]]:
    """The matrices of a bucket that are cut over tensor-parallel ranks, and of which one shard has all of a part."""
    if bucket.cuts is None:
        return []
    specs = [(name, bucket.layout.slots[bucket.layout.index[name]].spec) for name in bucket.matrices]
    return [
        (n, spec) for n, spec in specs if n in bucket.cuts.whole and spec.numel and not crosses(bucket.layout, spec)
    ]
