"""Where in a step a rank holds most, with gradients that come one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from fxshard.plan.buckets import BucketPlan
from fxshard.schedule.events import Event, Kind
from fxshard.schedule.schedule import Schedule


@dataclass(frozen=True)
class Peak:
    """The position of the event, what a rank has allocated then, and the gradients among it."""

    index: int
    bytes: int
    gradients: int


def peak_of(schedule: Schedule) -> Peak:
    """The peak of a step that begins without gradients. Those of a shard are made when the first of them is there."""
    late = {bucket.index: late_bytes(bucket) for bucket in schedule.buckets}
    held = schedule.resident_bytes + schedule.arena_bytes - sum(late.values())
    made = 0
    found = Peak(0, held, 0)
    for i, event in enumerate(schedule.events):
        kinds = (Kind.REDUCE, Kind.ACCUMULATE) if _apart(schedule, event) else (Kind.GRAD,)
        if event.kind in kinds:
            made += late.pop(event.bucket_index, 0)
        if held + made + event.peak > found.bytes:
            found = Peak(i, held + made + event.peak, made)
    return found


def late_bytes(bucket: BucketPlan) -> int:
    """The part of what a bucket holds at rest that backward allocates: the gradient of the shard."""
    return bucket.layout.shard_numel * bucket.master_dtype.itemsize if bucket.trainable else 0


def _apart(schedule: Schedule, event: Event) -> bool:
    """Whether full gradients have a place of their own, so that the shard's is made only by the reduction."""
    if event.bucket_index < 0:
        return False
    bucket = schedule.buckets[event.bucket_index]
    return bucket.grad_in_arena or (bucket.layout.ranks > 1 and not bucket.placement.grad)
