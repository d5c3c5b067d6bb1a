"""The optimizer phase of a schedule: the program of a step as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.exchange import Batch, CutAlone, cut_alone, local_work, parts_alone
from fxshard.planner.matrices import newton_schulz_flops
from fxshard.planner.optimizer_step import Done, Exchange, Land, Local, Orthogonalize, Share, plan_step
from fxshard.planner.parts import Parts
from fxshard.planner.state import update_traffic
from fxshard.schedule.events import TENSOR, Event, Kind, Phase, of_many


def updates(
    reduced: Mapping[int, Event], buckets: Sequence[BucketPlan], carried: Mapping[int, Event], group: str
) -> list[Event]:
    """The events of ``fxshard``'s optimizers. ``reduced``: the reductions of this step, ``carried``: the gathers that
    the next forward starts with, each by bucket. ``group``: that of buckets that do not say which theirs is."""
    program = plan_step(buckets)
    work = _work_alone(buckets, [step.batch for step in program if isinstance(step, Orthogonalize)])
    events: list[Event] = []
    for instruction in program:
        match instruction:
            case Exchange(batch):
                events.append(_exchange(batch, _group(batch, buckets, group), back=False))
            case Orthogonalize(batch):
                owned = [parts for rank in range(batch.ranks) if (parts := batch.parts(rank)) is not None]
                if owned:
                    events += _through_tensor_ranks(batch.names, owned, batch.buckets)
                else:
                    events.append(_orthogonalize(batch))
                returning = _exchange(batch, _group(batch, buckets, group), back=True)
                events.append(replace(returning, writes=batch.buckets))
            case Share(indices):
                events += [_share(buckets[index], group) for index in indices if index in reduced]
            case Done(indices):
                for index in (index for index in indices if index in reduced):
                    events.append(update(reduced[index], buckets[index], work.get(index, 0)))
                    if index in carried:
                        why = "the next forward starts with it"
                        events.append(replace(carried[index], phase=Phase.OPTIMIZER, why=why))
            case Local(indices):  # else a part of the update of the buckets that follow
                events += _cut_alone([buckets[index] for index in indices])
            case Land():
                pass  # part of the update, too
    return events


def update(reduction: Event, bucket: BucketPlan, flops: int = 0) -> Event:
    """The optimizer's work on one bucket."""
    shard = bucket.layout.shard_numel * bucket.master_dtype.itemsize
    muon = "NorMuon" if bucket.row_moments else "Muon"
    how = f"{muon}, {'whole' if bucket.layout.whole else 'row'} layout: {bucket.why}" if bucket.matrices else "AdamW"
    return replace(
        reduction,
        kind=Kind.UPDATE,
        phase=Phase.OPTIMIZER,
        bytes=shard,
        dtype=bucket.master_dtype,
        stream="compute",
        why=how,
        flops=flops,
        traffic=update_traffic(bucket),
        peak=bucket.staging_bytes,
        slot=None,
    )


def _work_alone(buckets: Sequence[BucketPlan], batches: Sequence[Batch]) -> dict[int, int]:
    """{bucket: operations} that matrices on one rank alone add to a step, for the rank that the others wait for.

    A rank that holds many of them owns fewer of those that travel. The batches below count their busiest owner each, so
    what is left for this is what the busiest rank does in all, less that.
    """
    ranks = max((bucket.layout.ranks for bucket in buckets), default=1)
    alone = local_work(buckets, ranks, newton_schulz_flops, cut=False)
    in_all = [sum(work.values()) for work in alone]
    for batch in batches:
        for rank, flops in enumerate(_work_of_owners(batch)):
            in_all[rank] += flops
    busiest = max(alone, key=lambda work: sum(work.values()))
    left = max(in_all) - sum(max(_work_of_owners(batch)) for batch in batches)
    whole = sum(busiest.values())
    return {index: int(flops * max(left, 0) / whole) for index, flops in busiest.items()}


def _group(batch: Batch, buckets: Sequence[BucketPlan], default: str) -> str:
    """The process group of an exchange: buckets whose matrices travel together have the same."""
    return buckets[batch.buckets[0]].group(default)


def _exchange(batch: Batch, group: str, *, back: bool) -> Event:
    names = batch.names
    dtype, where = (torch.bfloat16, "back from their owners") if back else (torch.float32, "to their owners")
    why, moved = f"{len(names)} matrices that lie on several ranks, {where}", batch.sent(back=back) * dtype.itemsize
    about = {"params": names, "bytes": moved // batch.ranks, "reads": batch.buckets}
    return of_many(Kind.EXCHANGE, Phase.OPTIMIZER, dtype, why, **about, group=group, stream="gather")


def _share(bucket: BucketPlan, group: str) -> Event:
    return of_many(
        Kind.EXCHANGE,
        Phase.OPTIMIZER,
        bucket.master_dtype,
        "parts of the shard that other replicas updated",
        params=bucket.params,
        bytes=bucket.layout.shard_numel * bucket.master_dtype.itemsize,
        group=bucket.group(group, replicas=True),
        stream="replicas",
        reads=(bucket.index,),
        writes=(bucket.index,),
    )


def _work_of_owners(batch: Batch) -> list[int]:
    """Operations of each rank on the matrices of the batch that it owns."""
    work = [0] * batch.ranks
    for travel in batch.travels:
        work[travel.owner] += newton_schulz_flops(travel.shape) if travel.cut is None else 0
    for rank in range(batch.ranks):
        parts = batch.parts(rank)
        work[rank] += parts.flops() if parts is not None else 0
    return work


def _orthogonalize(batch: Batch) -> Event:
    """The owners' compute: as long as the owner with most to do takes."""
    flops, traffic = max(_work_of_owners(batch)), 3 * batch.numel * torch.float32.itemsize // batch.ranks
    return _compute(batch.names, f"owners orthogonalize {len(batch.travels)} matrices", flops, traffic)


def _compute(names: tuple[str, ...], why: str, flops: int, traffic: int) -> Event:
    about = {"params": names, "flops": flops, "traffic": traffic}
    return of_many(Kind.COMPUTE, Phase.OPTIMIZER, torch.bfloat16, why, **about)


# -- matrices that are cut over tensor-parallel ranks ------------------------------------------------------------------


def _cut_alone(buckets: Sequence[BucketPlan]) -> list[Event]:
    """Events for matrices of which a data-parallel rank holds a part alone, before their buckets are updated."""
    cut = cut_alone(buckets)
    if not cut:
        return []
    touched = [each.bucket for each in cut]
    names = tuple(spec.name for each in cut for spec, _ in each.matrices)
    found = [
        _of_rank(cut, rank, replica)
        for rank in range(max(bucket.layout.ranks for bucket in touched))
        for replica in range(max(bucket.domain.replicas if bucket.shares_state else 1 for bucket in touched))
    ]
    indices = tuple(bucket.index for bucket in touched)
    return _through_tensor_ranks(names, [parts for parts in found if parts is not None], indices, written=indices)


def _of_rank(cut: Sequence[CutAlone], rank: int, replica: int) -> Parts | None:
    return parts_alone(cut, lambda bucket: (rank % bucket.layout.ranks, replica % bucket.domain.replicas))


def _through_tensor_ranks(
    names: tuple[str, ...], of_ranks: Sequence[Parts], buckets: tuple[int, ...], written: tuple[int, ...] = ()
) -> list[Event]:
    """Parts go to the ranks that orthogonalize them, and come back. ``of_ranks``: those of each data-parallel rank. The
    step waits for the rank that gets most, so what that gets are the bytes."""
    group, flops = of_ranks[0].group.name, max(parts.flops() for parts in of_ranks)
    numel = max(parts.most for parts in of_ranks)
    why = f"{group}: parts of {len(names)} matrices, each to the rank that orthogonalizes it"
    about = {"params": names, "bytes": numel * torch.float32.itemsize, "reads": buckets}
    there = of_many(Kind.EXCHANGE, Phase.OPTIMIZER, torch.float32, why, **about, group=group, stream=TENSOR)
    returned = numel * torch.bfloat16.itemsize
    why = f"{group}: parts of {len(names)} matrices, back from the ranks that orthogonalized them"
    return [
        there,
        _compute(names, f"ranks orthogonalize {len(names)} matrices in turns", flops, 3 * there.bytes),
        replace(there, bytes=returned, dtype=torch.bfloat16, why=why, writes=written),
        _compute(names, "parts that came back are put where they belong", 0, 2 * returned),
    ]
