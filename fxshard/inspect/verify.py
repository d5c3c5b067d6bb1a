"""What must hold for a schedule to compute the right thing, rule by rule.

A rule is a function that takes the step and raises at the first event that breaks it. Rules read the data of a schedule
only, so a schedule from a file is checked like one that was just planned. Each is linear in the events.

A step is a cycle: a gather in the optimizer phase belongs to the next forward, whose ``wait`` stands at the head of the
list without a gather before it. Such a bucket is called *carried*.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from fxshard.errors import FxshardError
from fxshard.events import Event, Kind, Phase
from fxshard.inspect.schedule import COMMUNICATES, Schedule
from fxshard.plan.buckets import BucketPlan
from fxshard.plan.memory import SlotRange
from fxshard.precision.modes import Gather

GRADIENT_BUCKETS = 2
"""Full gradient buckets that may be alive at once: the one being filled and the one being reduced."""

READ, WRITE = "read", "write"
"""What a compute event does with a bucket, beside the kinds of runtime events."""


class ScheduleError(FxshardError):
    """A schedule breaks a rule. This is a bug in whoever built or edited the schedule, never in the user's model."""

    def __init__(self, message: str, rule: str = "", index: int | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        """Name of the rule, which is the name of a function in this module."""
        self.index = index
        """Position of the event that breaks it."""


def verify(schedule: Schedule) -> None:
    """Raise :class:`ScheduleError` at the first rule that the schedule breaks; the message names the event."""
    buckets_exist(schedule)
    step = Step(schedule)
    for rule in RULES:
        rule(step)


@dataclass(frozen=True)
class Step:
    """A schedule, and what happens to each of its buckets in order: what the rules look at."""

    schedule: Schedule

    @cached_property
    def trails(self) -> dict[int, list[tuple[int, str]]]:
        """{bucket: [(position, kind or READ or WRITE)]}"""
        trails: dict[int, list[tuple[int, str]]] = {}
        for i, event in enumerate(self.schedule.events):
            if event.kind is Kind.COMPUTE:
                for index in event.reads:
                    trails.setdefault(index, []).append((i, READ))
                for index in event.writes:
                    trails.setdefault(index, []).append((i, WRITE))
            else:
                trails.setdefault(event.bucket_index, []).append((i, event.kind))
        return trails

    @cached_property
    def carried(self) -> dict[int, int]:
        """{bucket: position of its gather in the optimizer phase} of buckets that the next step starts with."""
        waited: dict[int, bool] = {}  # whether the first of gather and wait is the wait
        found: dict[int, int] = {}
        for i, event in enumerate(self.schedule.events):
            index = event.bucket_index
            if event.kind in (Kind.UNSHARD, Kind.WAIT):
                waited.setdefault(index, event.kind is Kind.WAIT)
                if event.kind is Kind.UNSHARD and event.phase is Phase.OPTIMIZER and waited[index]:
                    found[index] = i
        return found

    def bucket(self, index: int) -> BucketPlan:
        return self.schedule.buckets[index]

    def event(self, i: int) -> Event:
        return self.schedule.events[i]

    def lives(self) -> Iterator[tuple[int, SlotRange, bool]]:
        """(position, slot, taken or given back) of arena memory, in order. Carried buckets are there from the start."""
        held: dict[tuple[Kind, int], SlotRange] = {}
        for index, i in self.carried.items():
            slot = self.event(i).slot
            if slot is not None:
                held[self.given_back_by(self.event(i)), index] = slot
                yield i, slot, True
        for i, event in enumerate(self.schedule.events):
            if event.kind in GIVEN_BACK_BY and event.slot is not None:
                held[self.given_back_by(event), event.bucket_index] = event.slot
                yield i, event.slot, True
            elif (event.kind, event.bucket_index) in held:
                yield i, held.pop((event.kind, event.bucket_index)), False

    def given_back_by(self, event: Event) -> Kind:
        """The kind of event that frees what an event takes; a staging buffer is free when its gather is waited for."""
        staged = event.kind is Kind.UNSHARD and self.bucket(event.bucket_index).staged_in_arena
        return Kind.WAIT if staged else GIVEN_BACK_BY[event.kind]

    def broken(self, rule: Callable[[Step], None], i: int, what: str) -> NoReturn:
        raise _error(self.schedule, rule.__name__, i, what)


GIVEN_BACK_BY = {Kind.UNSHARD: Kind.RESHARD, Kind.GRAD: Kind.FINISH}


def _error(schedule: Schedule, rule: str, i: int, what: str) -> ScheduleError:
    event = schedule.events[i]
    about = f" of {event.bucket!r}" if event.bucket else ""
    return ScheduleError(f"{rule}: event {i} ({event.phase} {event.kind}{about}) {what}", rule, i)


# -- parameters --------------------------------------------------------------------------------------------------------


def buckets_exist(schedule: Schedule) -> None:
    """Every bucket that an event names is one of the schedule's."""
    count = len(schedule.buckets)
    for i, event in enumerate(schedule.events):
        named = (*event.reads, *event.writes) if event.kind is Kind.COMPUTE else (event.bucket_index,)
        for index in named:
            if not 0 <= index < count:
                raise _error(schedule, "buckets_exist", i, f"is about bucket {index}, but there are {count}")


def no_double_gather(step: Step) -> None:
    """A bucket that is unsharded is not gathered again: until it is released, or, if resident, until it is updated."""
    for index, trail in step.trails.items():
        resident = step.bucket(index).resident
        gathered = step.carried.get(index)
        for i, what in trail:
            if what == Kind.UNSHARD:
                if gathered is not None:
                    step.broken(no_double_gather, i, f"gathers what is there since event {gathered}")
                gathered = i
            elif what == (Kind.UPDATE if resident else Kind.RESHARD):
                gathered = None


def unshard_has_one_wait_and_one_reshard(step: Step) -> None:
    """Each gather is waited for, once in each phase that uses it, and released once, unless it is resident.

    A bucket kept from forward to backward has its gather in forward, a wait in both, and its reshard in backward.
    """
    rule = unshard_has_one_wait_and_one_reshard
    for index, trail in step.trails.items():
        resident = step.bucket(index).resident
        gathered = step.carried.get(index)
        waited: set[Phase] = set()
        for i, what in trail:
            if what == Kind.UNSHARD:
                gathered, waited = i, set()
            elif what == Kind.WAIT:
                if gathered is None and not resident:
                    step.broken(rule, i, "waits for a bucket that nothing gathers")
                if step.event(i).phase in waited:
                    step.broken(rule, i, "waits a second time in its phase")
                waited.add(step.event(i).phase)
            elif what == Kind.RESHARD:
                if resident:
                    step.broken(rule, i, "releases a bucket that is resident")
                if gathered is None:
                    step.broken(rule, i, "releases a bucket that is not gathered")
                if not waited:
                    step.broken(rule, i, f"releases what event {gathered} gathers, but nothing waits for it")
                gathered = None
        if gathered is None or gathered == step.carried.get(index):
            continue
        if not waited:
            step.broken(rule, gathered, "has no wait")
        if not resident:
            step.broken(rule, gathered, "has no reshard")


def reads_between_wait_and_reshard(step: Step) -> None:
    """Parameters are read behind a wait for their bucket and before its reshard."""
    for index, trail in step.trails.items():
        readable, since = False, -1
        for i, what in trail:
            if what in (Kind.UNSHARD, Kind.WAIT, Kind.RESHARD):
                readable, since = what == Kind.WAIT, i
            elif what == READ and not readable:
                why = f"last it was {step.event(since).kind} at event {since}" if since >= 0 else "nothing came before"
                name = step.bucket(index).name
                step.broken(reads_between_wait_and_reshard, i, f"reads {name!r}, which is not there: {why}")


# -- gradients ---------------------------------------------------------------------------------------------------------


def reduce_after_all_writes(step: Step) -> None:
    """Each gradient bucket that is taken is reduced once, and behind its last write."""
    rule = reduce_after_all_writes
    for trail in step.trails.values():
        taken = reduced = None
        for i, what in trail:
            if what == Kind.GRAD:
                taken, reduced = i, None
            elif what == Kind.REDUCE:
                if taken is None:
                    step.broken(rule, i, "reduces a gradient bucket that was not taken")
                if reduced is not None:
                    step.broken(rule, i, f"reduces again what event {reduced} reduces")
                reduced = i
            elif what == WRITE and reduced is not None and taken is not None:
                step.broken(rule, reduced, f"stands before event {i}, which writes to the bucket")
            elif what == Kind.FINISH:
                if reduced is None:
                    step.broken(rule, i, "ends a reduction that was not started")
                taken = reduced = None
        if taken is not None:
            what = "is never reduced" if reduced is None else f"is reduced by event {reduced}, but has no finish"
            step.broken(rule, taken, what)


def not_rewritten_before_reduced(step: Step) -> None:
    """A gradient bucket is taken once, and not again before its reduction is over; nothing writes to one not taken."""
    rule = not_rewritten_before_reduced
    for index, trail in step.trails.items():
        taken = None
        for i, what in trail:
            if what == Kind.GRAD:
                if taken is not None:
                    step.broken(rule, i, f"takes again what event {taken} took, before it is finished")
                taken = i
            elif what == Kind.FINISH:
                taken = None
            elif what == WRITE and taken is None:
                step.broken(rule, i, f"writes to the gradients of {step.bucket(index).name!r}, which are not taken")


def at_most_two_gradient_buckets(step: Step) -> None:
    """No more than two full gradient buckets are alive; those that are not in the arena are where they stay."""
    alive: set[int] = set()
    for i, event in enumerate(step.schedule.events):
        if event.kind is Kind.GRAD and step.bucket(event.bucket_index).grad_in_arena:
            alive.add(event.bucket_index)
            if len(alive) > GRADIENT_BUCKETS:
                names = ", ".join(step.bucket(index).name for index in sorted(alive))
                step.broken(at_most_two_gradient_buckets, i, f"makes {len(alive)} gradient buckets alive: {names}")
        elif event.kind is Kind.FINISH:
            alive.discard(event.bucket_index)


# -- quantized parameters ----------------------------------------------------------------------------------------------


def staging_and_gradients_take_turns(step: Step) -> None:
    """Between a staged gather and its wait nobody takes, writes or holds the gradients that share its memory.

    The staging write is part of the gather, so what is gathered is what was staged, whoever cleared gradients before.
    """
    rule = staging_and_gradients_take_turns
    for index, trail in step.trails.items():
        if not step.bucket(index).staged:
            continue
        staged = taken = None
        for i, what in trail:
            if what == Kind.UNSHARD:
                if taken is not None:
                    step.broken(rule, i, f"stages parameters where event {taken} holds gradients")
                staged = i
            elif what == Kind.WAIT:
                staged = None
            elif what in (Kind.GRAD, WRITE) and staged is not None:
                step.broken(rule, i, f"writes gradients where event {staged} has staged parameters")
            taken = i if what == Kind.GRAD else None if what == Kind.FINISH else taken


def waits_get_their_copies(step: Step) -> None:
    """A wait for quantized parameters gives copies that its gather brought, and a gather brings some."""
    rule = waits_get_their_copies
    for index, trail in step.trails.items():
        if step.bucket(index).gather is not Gather.DIRECT:
            continue
        gathered = step.carried.get(index)
        for i, what in trail:
            copies = step.event(i).copies
            if what == Kind.UNSHARD:
                gathered = i
                if not copies.number or step.event(i).bytes != copies.number * step.bucket(index).gathered_bytes:
                    step.broken(
                        rule, i, f"moves {step.event(i).bytes} bytes, but is to bring {copies.value or 'nothing'}"
                    )
            elif what == Kind.WAIT and gathered is not None:
                brought = step.event(gathered).copies
                if (copies.rowwise and not brought.rowwise) or (copies.columnwise and not brought.columnwise):
                    step.broken(rule, i, f"wants {copies.value}, but event {gathered} brings {brought.value}")


# -- the optimizer -----------------------------------------------------------------------------------------------------


def every_reduced_bucket_is_updated_once(step: Step) -> None:
    """What is reduced is updated, once, behind its last reduction; nothing else is."""
    rule = every_reduced_bucket_is_updated_once
    for trail in step.trails.values():
        reduced = updated = None
        for i, what in trail:
            if what == Kind.REDUCE:
                if updated is not None:
                    step.broken(rule, i, f"is behind the update of its bucket, event {updated}")
                reduced = i
            elif what == Kind.UPDATE:
                if updated is not None:
                    step.broken(rule, i, f"updates again what event {updated} updates")
                if reduced is None:
                    step.broken(rule, i, "updates a bucket whose gradient is not reduced before")
                updated = i
        if reduced is not None and updated is None:
            step.broken(rule, reduced, "reduces a bucket that nothing updates")


def gather_after_update(step: Step) -> None:
    """A gather in the optimizer phase is the next step's: it stands behind its bucket's update, and waits for it.

    Standing behind is not enough: gathers run on a stream of their own.
    """
    for trail in step.trails.values():
        updates = [i for i, what in trail if what == Kind.UPDATE]
        if not updates:
            continue
        for i, what in trail:
            if what != Kind.UNSHARD or step.event(i).phase is not Phase.OPTIMIZER:
                continue
            if i < updates[-1]:
                step.broken(gather_after_update, i, f"reads a shard that event {updates[-1]} has yet to update")
            if updates[-1] not in step.event(i).waits_for:
                step.broken(gather_after_update, i, f"does not wait for event {updates[-1]}, which updates the shard")


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
        step.broken(rule, i, "has a place in the arena, but its bucket stays elsewhere")
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
    if schedule.peak_bytes != schedule.resident_bytes + schedule.arena_bytes:
        step.broken(rule, at, f"is the peak: peak_bytes is {schedule.peak_bytes}, not resident + arena")
    if schedule.budget is not None and schedule.peak_bytes > schedule.budget:
        step.broken(rule, at, f"is the peak: {schedule.peak_bytes} bytes exceed the budget of {schedule.budget}")


# -- dependencies ------------------------------------------------------------------------------------------------------


def dependencies_point_backwards(step: Step) -> None:
    """Events wait for earlier events only, and for all that streams do not order by themselves.

    A wait waits for its gather, a reduction for the last write, an update for the reduction, and whatever takes arena
    bytes for those who had them last.
    """
    rule = dependencies_point_backwards
    latest: dict[tuple[str, int], int] = {}
    for i, event in enumerate(step.schedule.events):
        for need in event.waits_for:
            if not 0 <= need < i:
                step.broken(rule, i, f"waits for event {need}, which is not before it")
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
    """Whether event ``i`` starts behind the release at ``freed``, which may be implied: streams are in order."""
    event, release = step.event(i), step.event(freed)
    if release.kind is Kind.WAIT:  # of a staged bucket: compute is behind the wait, other gathers behind this one
        return True
    if release.kind is Kind.RESHARD:
        needs = [need for need in event.waits_for if step.event(need).kind not in COMMUNICATES]
        return event.kind not in COMMUNICATES or max(needs, default=-1) >= freed
    reduced = max((need for need in release.waits_for if step.event(need).kind is Kind.REDUCE), default=freed)
    for need in event.waits_for:
        reductions = (need,) if step.event(need).kind is Kind.REDUCE else step.event(need).waits_for
        if any(step.event(at).kind is Kind.REDUCE and at >= reduced for at in reductions):
            return True
    return False


RULES: tuple[Callable[[Step], None], ...] = (
    no_double_gather,
    unshard_has_one_wait_and_one_reshard,
    reads_between_wait_and_reshard,
    not_rewritten_before_reduced,
    reduce_after_all_writes,
    at_most_two_gradient_buckets,
    staging_and_gradients_take_turns,
    waits_get_their_copies,
    every_reduced_bucket_is_updated_once,
    gather_after_update,
    no_arena_overlap,
    peak_is_what_it_says,
    dependencies_point_backwards,
)
