"""The rules that a schedule must keep to compute the right thing.

A rule is a function that takes the step and raises at the first event that breaks it. Rules read the data of a schedule
only, so a schedule from a file is checked like one that was just planned. Each is linear in the events. Those about
memory and dependencies are in :mod:`fxshard.schedule.memory_rules`.
"""

from __future__ import annotations

from collections.abc import Callable

from fxshard.planner.tuning import GRADIENT_BUCKETS
from fxshard.schedule import (
    bucket_rules,
    collective_rules,
    event_rules,
    exchange_rules,
    memory_rules,
    offload_rules,
    scales,
    staging_rules,
)
from fxshard.schedule.events import OF_MANY, Kind, Phase
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.step import READ, WRITE, ScheduleError, Step, error_at

__all__ = ["RULES", "ScheduleError", "Step", "verify"]


def verify(schedule: Schedule) -> None:
    """Raise :class:`ScheduleError` at the first rule that the schedule breaks; the message names the event."""
    buckets_exist(schedule)
    step = Step(schedule)
    for rule in RULES:
        rule(step)


# -- parameters --------------------------------------------------------------------------------------------------------


def buckets_exist(schedule: Schedule) -> None:
    """Every bucket that an event names is one of the schedule's; every event that it waits for is an earlier one."""
    count = len(schedule.buckets)
    for i, event in enumerate(schedule.events):
        of_many = event.kind in OF_MANY
        named = (*event.reads, *event.writes) if of_many else (event.bucket_index,)
        for index in named:
            if not 0 <= index < count:
                raise error_at(schedule, "buckets_exist", i, f"is about bucket {index}, but there are {count}")
        for need in event.waits_for:
            if not 0 <= need < i:
                what = f"waits for event {need}, which is not before it"
                raise error_at(schedule, "dependencies_point_backwards", i, what)


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
    """Parameters are read after a wait for their bucket in the same phase and before its reshard."""
    for index, trail in step.trails.items():
        readable, since = False, -1
        for i, what in trail:
            if what in (Kind.UNSHARD, Kind.WAIT, Kind.RESHARD):
                readable, since = what == Kind.WAIT, i
            elif what == READ and not (readable and step.event(since).phase is step.event(i).phase):
                why = f"last it was {step.event(since).kind} at event {since}" if since >= 0 else "nothing came before"
                name = step.bucket(index).name
                step.broken(reads_between_wait_and_reshard, i, f"reads {name!r}, which is not there: {why}")


# -- gradients ---------------------------------------------------------------------------------------------------------


def reduce_after_all_writes(step: Step) -> None:
    """Each gradient bucket that is taken is reduced once (or, inside no_sync, kept once), and after its last write."""
    rule = reduce_after_all_writes
    for trail in step.trails.values():
        taken = reduced = None
        for i, what in trail:
            if what == Kind.GRAD:
                taken, reduced = i, None
            elif what in (Kind.REDUCE, Kind.ACCUMULATE):
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


# -- the optimizer -----------------------------------------------------------------------------------------------------


def every_reduced_bucket_is_updated_once(step: Step) -> None:
    """A bucket that is reduced is updated, once, after its last reduction; no other bucket is."""
    rule = every_reduced_bucket_is_updated_once
    for trail in step.trails.values():
        reduced = updated = None
        for i, what in trail:
            if what == Kind.REDUCE:
                if updated is not None:
                    step.broken(rule, i, f"comes after the update of its bucket, event {updated}")
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
    """A gather in the optimizer phase is the next step's: it comes after its bucket's update, and waits for it.

    To come after it in the program is not enough: gathers run on a stream of their own.
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


RULES: tuple[Callable[[Step], None], ...] = (
    bucket_rules.header_is_possible,
    bucket_rules.buckets_are_possible,
    no_double_gather,
    unshard_has_one_wait_and_one_reshard,
    reads_between_wait_and_reshard,
    not_rewritten_before_reduced,
    reduce_after_all_writes,
    exchange_rules.replicas_are_added_up_once,
    at_most_two_gradient_buckets,
    staging_rules.staging_and_gradients_take_turns,
    staging_rules.staging_keeps_to_its_bytes,
    staging_rules.waits_get_their_copies,
    scales.scales_come_first,
    every_reduced_bucket_is_updated_once,
    gather_after_update,
    exchange_rules.exchanges_go_there_and_back,
    memory_rules.no_arena_overlap,
    memory_rules.peak_is_what_it_says,
    memory_rules.dependencies_point_backwards,
    event_rules.phases_are_in_order,
    event_rules.events_match_their_buckets,
    event_rules.waits_are_where_their_gathers_are,
    event_rules.waits_and_gradients_are_used,
    event_rules.optimizer_follows_from_the_buckets,
    exchange_rules.exchanges_have_one_order,
    event_rules.computes_are_those_of_the_graphs,
    collective_rules.collectives_have_one_order,
    collective_rules.collectives_are_those_of_the_graphs,
    offload_rules.copies_are_those_of_the_graphs,
    offload_rules.memory_is_kept_until_it_is_out,
    offload_rules.offloaded_values_are_back_when_read,
    offload_rules.host_slots_are_free,
    bucket_rules.memory_is_what_it_says,
    event_rules.waits_for_follows_from_the_order,
)
