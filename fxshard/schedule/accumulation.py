"""The schedule of a micro-batch inside ``no_sync``: full gradients are kept where the step would reduce them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.schedule.events import Event, Kind, Phase

if TYPE_CHECKING:
    from fxshard.schedule.schedule import Schedule

PASSES = 3
"""Adding to what is kept reads both and writes one."""

SCRATCH = 2
"""Full gradient buckets that are filled in addition to what is kept, where they are not in the arena."""


def accumulating(step: Schedule) -> Schedule:
    """Forward and backward of ``step`` without its reductions and its optimizer. No budget bounds what is kept."""
    from fxshard.schedule.dependencies import with_dependencies

    used = {event.bucket_index: i for i, event in reversed(list(step.of(Kind.WAIT, phase=Phase.FORWARD)))}
    carried = [event for _, event in step.of(Kind.UNSHARD, phase=Phase.OPTIMIZER)]
    carried.sort(key=lambda event: used[event.bucket_index])  # in the forward's order, not in that of updates
    first = [replace(event, phase=Phase.FORWARD, why="no optimizer phase before gathers it") for event in carried]
    scales = [event for _, event in step.of(Kind.SCALES)]
    stay = (e for e in step.events if e.kind not in (Kind.ALL_REDUCE, Kind.SCALES) and e.phase is not Phase.OPTIMIZER)
    within = [_kept(event, step.buckets[event.bucket_index]) for event in stay]
    events = [*scales, *first, *within]
    resident = step.resident_bytes + kept_bytes(step.buckets)
    return replace(step, events=tuple(with_dependencies(events, step.buckets)), resident_bytes=resident, budget=None)


def kept_bytes(buckets: tuple[BucketPlan, ...]) -> int:
    """Bytes beyond a step's own memory: a full gradient per bucket that has no place for one (under ZeRO-1 it has).

    Where gradients are not written to the arena, scratch is needed in addition to what is kept.
    """
    reduced = [bucket for bucket in buckets if bucket.trainable and bucket.domain.ranks > 1]
    has_place = [bucket for bucket in reduced if bucket.layout.ranks > 1 and not bucket.placement.grad]
    kept = sum(bucket.grad_bytes for bucket in reduced if bucket not in has_place)
    return kept + SCRATCH * max((bucket.grad_bytes for bucket in reduced if not bucket.grad_in_arena), default=0)


def _kept(event: Event, bucket: BucketPlan) -> Event:
    if event.kind is not Kind.REDUCE:
        return event
    why = "kept until a backward synchronises" if bucket.domain.ranks > 1 else "no other rank holds it"
    return replace(
        event, kind=Kind.ACCUMULATE, stream="compute", group="", why=why, traffic=PASSES * event.bytes, slot=None
    )
