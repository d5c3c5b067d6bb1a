"""Rules about memory and about what waits for what; see :mod:`fxshard.schedule.verify`."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable

from fxshard.planner.memory import SlotRange
from fxshard.schedule.events import Event, Kind
from fxshard.schedule.schedule import COMMUNICATES
from fxshard.schedule.step import GIVEN_BACK_BY, WRITE, Step

# -- memory ------------------------------------------------------------------------------------------------------------


def no_arena_overlap(step: Step) -> None:
    """Buffers that are alive at the same time share no bytes of the arena, and lie inside it.

    A gathered bucket lives from unshard to reshard, across phases if it is kept; a gradient bucket from grad to finish.
    """
    rule = no_arena_overlap
    for i, event in step.schedule.of(*GIVEN_BACK_BY):
        _check_slot(step, rule, i, event)
    live: list[tuple[int, int, int]] = []  # (offset, end, position), disjoint and sorted
    for i, slot, taken in step.lives():
        at = bisect(live, (slot.offset, slot.end, i if taken else len(step.schedule)))
        if not taken:
            live.pop(at - 1)
            continue
        for offset, end, other in live[max(0, at - 1) : at + 1]:
            if offset < slot.end and slot.offset < end:
                step.broken(rule, i, f"takes arena bytes {slot.offset} to {slot.end}, which event {other} holds")
        live.insert(at, (slot.offset, slot.end, i))


def _check_slot(step: Step, rule: Callable[[Step], None], i: int, event: Event) -> None:
    bucket, slot = step.bucket(event.bucket_index), event.slot
    if event.kind is Kind.UNSHARD:
        in_arena = not bucket.resident or bucket.staged_in_arena
    else:
        in_arena = bucket.grad_in_arena
    if slot is None:
        if in_arena:
            step.broken(rule, i, "has no place in the arena")
    elif not in_arena:
        step.broken(rule, i, "has a place in the arena, but its bucket is not kept there")
    elif slot.offset < 0 or slot.end > step.schedule.arena_bytes:
        step.broken(rule, i, f"ends at byte {slot.end} of an arena of {step.schedule.arena_bytes}")
    elif slot.bytes < event.bytes:
        step.broken(rule, i, f"needs {event.bytes} bytes and has a place of {slot.bytes}")


def peak_is_what_it_says(step: Step) -> None:
    """``peak_bytes`` covers what a rank holds at rest and what is alive in the arena, and keeps to the budget."""
    rule, schedule = peak_is_what_it_says, step.schedule
    alive, peak, at = 0, 0, 0
    for i, slot, taken in step.lives():
        alive += slot.bytes if taken else -slot.bytes
        if alive > peak:
            peak, at = alive, i
    if not schedule.events:
        return
    if peak > schedule.arena_bytes:
        step.broken(rule, at, f"brings the arena to {peak} bytes, but arena_bytes is {schedule.arena_bytes}")
    at_rest = (bucket.at_rest(state_tensors=0) for bucket in schedule.buckets)
    least = sum(rest.param + rest.grad + rest.state for rest in at_rest)
    if schedule.resident_bytes < least:
        step.broken(
            rule, at, f"is the peak: shards take {least} bytes, but resident_bytes is {schedule.resident_bytes}"
        )
    if schedule.budget is not None and schedule.peak_bytes > schedule.budget:
        step.broken(rule, at, f"is the peak: {schedule.peak_bytes} bytes exceed the budget of {schedule.budget}")


# -- dependencies ------------------------------------------------------------------------------------------------------


def dependencies_point_backwards(step: Step) -> None:
    """Events wait for earlier events only, and for all that streams do not order by themselves.

    A wait waits for its gather, a reduction for the last write, an update for the reduction, and whatever takes arena
    bytes for the release of those bytes.
    """
    rule = dependencies_point_backwards
    latest: dict[tuple[str, int], int] = {}
    for i, event in enumerate(step.schedule.events):
        source = WAITS_FOR_LATEST.get(event.kind)
        need = latest.get((source, event.bucket_index), -1) if source is not None else -1
        if need >= 0 and need not in event.waits_for:
            step.broken(rule, i, f"does not wait for event {need} ({step.event(need).kind})")
        latest[event.kind, event.bucket_index] = i
        for index in event.writes:
            latest[WRITE, index] = i
    _takes_what_is_free(step, rule)


WAITS_FOR_LATEST: dict[Kind, str] = {
    Kind.WAIT: Kind.UNSHARD,
    Kind.REDUCE: WRITE,
    Kind.ALL_REDUCE: Kind.REDUCE,
    Kind.FINISH: Kind.REDUCE,
    Kind.UPDATE: Kind.REDUCE,
}


def _takes_what_is_free(step: Step, rule: Callable[[Step], None]) -> None:
    free: dict[SlotRange, int] = {}  # {bytes: the event that gave them back}
    for i, slot, taken in step.lives():
        if not taken:
            free[slot] = i
            continue
        for other in [other for other in free if other.offset < slot.end and slot.offset < other.end]:
            freed = free.pop(other)
            if not _waits_until_free(step, i, freed):
                step.broken(rule, i, f"takes arena bytes, but does not wait for event {freed} to free them")


def _waits_until_free(step: Step, i: int, freed: int) -> bool:
    """Whether event ``i`` starts after the release at ``freed``, which may be implied: streams are in order."""
    event, release = step.event(i), step.event(freed)
    if release.kind is Kind.WAIT:  # of a staged bucket: compute is after the wait, other gathers after this one
        return True
    reductions_before = any(step.event(need).kind is Kind.REDUCE for need in release.waits_for)
    if release.kind is Kind.RESHARD or not reductions_before:  # given back by compute
        needs = [need for need in event.waits_for if step.event(need).kind not in COMMUNICATES]
        return event.kind not in COMMUNICATES or max(needs, default=-1) >= freed
    reduced = max((need for need in release.waits_for if step.event(need).kind is Kind.REDUCE), default=freed)
    for need in event.waits_for:
        reductions = (need,) if step.event(need).kind is Kind.REDUCE else step.event(need).waits_for
        if any(step.event(at).kind is Kind.REDUCE and at >= reduced for at in reductions):
            return True
    return False
