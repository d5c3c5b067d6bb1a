"""The scales of weights in float8: one event of a step, and what must hold for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.schedule.events import Event, Kind, Phase, of_many
from fxshard.schedule.step import Step


def scales_event(buckets: Sequence[BucketPlan], phase: Phase, group: str) -> Event | None:
    """The first event of a program where weights rest in float8; ``group``: that of buckets that do not say theirs.

    All ranks read their masters once and combine the largest magnitudes in one all-reduce.
    """
    own = [bucket for bucket in buckets if bucket.scale_shapes]
    if not own:
        return None
    return of_many(
        Kind.SCALES,
        phase,
        torch.float32,
        f"largest magnitudes of {sum(len(bucket.params) for bucket in own)} weights",
        params=tuple(name for bucket in own for name in bucket.params),
        bytes=sum(bucket.scale_bytes for bucket in own),
        group=own[0].group(group),
        reads=tuple(bucket.index for bucket in own),
        traffic=sum(bucket.layout.shard_numel * bucket.master_dtype.itemsize for bucket in own),
    )


def scales_come_first(step: Step) -> None:
    """Float8 is quantized with scales of this step: they come once, and before every gather of such a bucket."""
    scaled: int | None = None
    known: tuple[int, ...] = ()
    for i, event in enumerate(step.schedule.events):
        if event.kind is Kind.SCALES:
            if scaled is not None:
                step.broken(scales_come_first, i, f"scales weights again, after event {scaled}")
            scaled, known = i, event.reads
        elif event.kind is Kind.UNSHARD and step.bucket(event.bucket_index).scale_shapes:
            if event.bucket_index not in known:
                step.broken(scales_come_first, i, "quantizes weights whose scales no event before it makes")
            if event.phase is not Phase.BACKWARD and scaled not in event.waits_for:
                step.broken(scales_come_first, i, f"does not wait for the scales of event {scaled}")
