"""Forward, backward, evaluation: when each gather starts.

Requires gathers, waits and releases. Gives every gather a start ahead of its ``wait``; they start in the order in which
they are needed, so all ranks agree on it. Two rules, both in terms of the events that are there already, so that no
stretch of compute is cut further:

* a fixed depth: gather ``k`` starts once bucket ``k - depth`` is in use and what came before that one is released;
* deadlines: with the durations of the cost model, walking backwards, ``start(k) = min(deadline(k), start(k + 1)) -
  duration(k)`` is the latest start that still hides gather ``k``, hence the one that holds memory for the shortest
  time. No more than ``depth`` gathers start early, which bounds the memory where communication cannot be hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fxshard.passes.context import PassContext
from fxshard.passes.timeline import Gather, PhaseTimeline
from fxshard.planner.collectives import gather_seconds, link, reduce_seconds, replicas_seconds
from fxshard.planner.tuning import MARGIN, PLAINLY_LEADING
from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.profile import Profile

Places = Mapping[int, int]
"""{bucket: a place}"""


def order_prefetch(part: PhaseTimeline, depth: int, latest: Places | None = None, leading: int = 0) -> PhaseTimeline:
    """Gathers as early as ``depth`` allows, or where given, at their :func:`latest_starts`.

    ``leading``: how many gathers forward starts with, whatever durations say.
    """
    sequence, needed = _in_order(part), part.places(Kind.WAIT)
    earliest = _by_depth(part, depth)
    starts, why = earliest, dict.fromkeys(sequence, f"{depth} ahead")
    if latest is not None:
        starts = {index: max(earliest[index], min(latest[index], needed[index])) for index in sequence}
        for index in sequence:
            hidden = latest[index] >= earliest[index]
            why[index] = "latest start that hides it" if hidden else f"as early as {depth} ahead allows"
        if part.phase is Phase.FORWARD:
            starts |= dict.fromkeys(list(sequence)[: min(leading, PLAINLY_LEADING)], 0)
    ordered: list[Gather] = []
    place = 0
    for index, gather in sequence.items():
        place = max(starts[index], place)  # first needed, first started
        event = replace(gather.event, why="at the start" if place == 0 else why[index])
        ordered.append(replace(gather, event=event, after=part.node_before(place)))
    return replace(part, gathers=tuple(ordered))


def latest_starts(part: PhaseTimeline, context: PassContext) -> dict[int, int]:
    """The latest place from which each gather is still done when it is needed."""
    sequence, needed = _in_order(part), part.places(Kind.WAIT)
    clock = _clock(part, context) if sequence else []
    starts: dict[int, int] = {}
    next_start = float("inf")
    for index in reversed(sequence):
        next_start = min(clock[needed[index]], next_start) - _gather_seconds(index, part.phase, context) * MARGIN
        place = needed[index]
        while place > 0 and clock[place] > next_start:
            place -= 1
        starts[index] = place
    return starts


def late_gathers(part: PhaseTimeline, latest: Places) -> set[tuple[Phase, int]]:
    """Gathers that start where durations say they are not done when they are needed, by their runtime nodes."""
    return {(part.phase, gather.node) for gather in part.gathers if latest[gather.bucket] < part.place(gather)}


def _in_order(part: PhaseTimeline) -> dict[int, Gather]:
    """Gathers by bucket, in the order in which they are needed."""
    needed = part.places(Kind.WAIT)
    gathers = {gather.bucket: gather for gather in part.gathers}
    return {index: gathers[index] for index in sorted(gathers, key=needed.__getitem__)}


def _by_depth(part: PhaseTimeline, depth: int) -> dict[int, int]:
    """The earliest start that ``depth`` allows: the bucket ``depth`` earlier is in use, those before are released."""
    sequence, needed, released = list(_in_order(part)), part.places(Kind.WAIT), part.places(Kind.RESHARD)
    starts: dict[int, int] = {}
    for k, index in enumerate(sequence):
        if k < depth:
            starts[index] = 0
        elif depth == 0:
            starts[index] = needed[index]
        else:
            in_use = needed[sequence[k - depth]] + 1
            gone = [released[earlier] + 1 for earlier in sequence[: k - depth] if earlier in released]
            starts[index] = max([in_use, *[at for at in gone if at <= needed[index]]])
    return starts


def _gather_seconds(index: int, phase: Phase, context: PassContext) -> float:
    """Time the link needs for a bucket. In backward it carries the reduction of another bucket in the meantime."""
    bucket, hardware = context.buckets[index], context.hardware
    assert hardware is not None
    profile = context.profile or Profile()
    seconds = profile.gather(bucket.name)
    if seconds is None:
        seconds = gather_seconds(bucket, bucket.gathered_bytes, hardware)
    if phase is Phase.BACKWARD and bucket.trainable:
        reduce = profile.reduce(bucket.name)
        seconds += reduce_seconds(bucket, bucket.grad_bytes, hardware) if reduce is None else reduce
        if bucket.adds_replicas and link(bucket, hardware) == link(bucket, hardware, replicas=True):
            seconds += replicas_seconds(bucket, bucket.grad_bytes, hardware)
    return seconds


def _clock(part: PhaseTimeline, context: PassContext) -> list[float]:
    """When compute reaches each place, by a profile or the cost model, and without waiting for anything."""
    assert context.hardware is not None
    dtype = max(context.buckets, key=lambda bucket: bucket.layout.numel).param_dtype
    recorded = context.profile
    if recorded is not None and not recorded.fits(part.phase, (entry.event for entry in part.others)):
        recorded = None
    clock = [0.0]
    for i, entry in enumerate(part.others):
        seconds = recorded.compute(part.phase, i) if recorded is not None else None
        if seconds is None and (entry.flops or entry.traffic):
            seconds = context.hardware.compute_seconds(entry.flops, entry.traffic, dtype, entry.float8_flops)
        clock.append(clock[-1] + (seconds or 0.0))
    return clock
