"""Rules for matrices that travel to the rank that orthogonalizes them, over any groups."""

from __future__ import annotations

from collections.abc import Callable

from fxshard.schedule.events import TENSOR, Kind, Phase
from fxshard.schedule.step import Step

TO_TENSOR_RANKS = (TENSOR, "compute", TENSOR, "compute")
"""Parts go to a rank that orthogonalizes them, and what comes back is put where it belongs."""
WAYS = (("gather", "compute", "gather"), TO_TENSOR_RANKS, ("gather", *TO_TENSOR_RANKS, "gather"), ("replicas",))
"""The streams that matrices take, one after another. ``replicas``: parts of shards, which other replicas updated."""

SENDS = (Kind.EXCHANGE, Kind.UNSHARD)


def exchanges_go_there_and_back(step: Step) -> None:
    """Matrices travel after the reduction of their gradients, are computed, come back, and then update their buckets.

    Each waits for the one before: there and back run during compute. Where they are cut over tensor-parallel ranks,
    those exchange parts there and back around the computation, inside of the exchange between data-parallel ranks.
    """
    rule = exchanges_go_there_and_back
    taken: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
    returned: dict[int, int] = {}
    reduced: dict[int, int] = {}
    # A bucket that no graph uses travels too, as zeros: nothing reduces or updates it.
    used = {event.bucket_index for _, event in step.schedule.of(Kind.REDUCE)}
    for i, event in enumerate(step.schedule.events):
        if event.kind is Kind.REDUCE:
            reduced[event.bucket_index] = i
        elif event.phase is Phase.OPTIMIZER and event.kind in (Kind.EXCHANGE, Kind.COMPUTE):
            way = taken.setdefault((event.stream == "replicas", event.params), [])
            if way and way[-1] not in event.waits_for:
                step.broken(rule, i, f"does not wait for event {way[-1]}, which is about the same matrices")
            if event.kind is Kind.EXCHANGE and not way:
                _after_reductions(step, rule, i, used, reduced)
            way.append(i)
            streams = tuple(step.event(at).stream for at in way)
            if streams not in {known[: len(streams)] for known in WAYS}:
                step.broken(rule, i, "is about matrices that have not been sent, or not been computed")
            returned.update({index: i for index in event.writes if index in used})
        elif event.kind is Kind.UPDATE:
            back = returned.pop(event.bucket_index, None)
            if back is not None and back not in event.waits_for:
                step.broken(rule, i, f"does not wait for event {back}, which brings its matrices back")
    for way in taken.values():
        last = [i for i in way if step.event(i).kind is Kind.EXCHANGE][-1:]
        if tuple(step.event(i).stream for i in way) not in WAYS or not step.event(last[0]).writes:
            step.broken(rule, way[-1], "is about matrices that never come back")
    for i in returned.values():
        step.broken(rule, i, "brings back matrices of a bucket that nothing updates after it")


def exchanges_have_one_order(step: Step) -> None:
    """Ranks start what an optimizer's step sends in the order of its plan, across all groups.

    The plan follows from the buckets, on which ranks agree, so that order is the same on each. A rank that exchanged
    matrices with data-parallel ranks first, and parts of others with tensor-parallel ranks then, while another one did
    it the other way round, would wait for it for ever.
    """
    found = [(i, event) for i, event in step.schedule.of(*SENDS, phase=Phase.OPTIMIZER)]
    if not any(event.kind is Kind.EXCHANGE for _, event in found):
        return
    planned = [event for event in step.planned_updates if event.kind in SENDS]
    for (i, event), wanted in zip(found, planned, strict=True):  # the same ones, by the rule before
        if (event.kind, event.stream, event.params) != (wanted.kind, wanted.stream, wanted.params):
            what = f"starts where {wanted.kind} of {', '.join(wanted.params)} in {wanted.group} has its turn"
            step.broken(exchanges_have_one_order, i, f"{what}: ranks that start collectives in different orders hang")


def _after_reductions(
    step: Step, rule: Callable[[Step], None], i: int, used: set[int], reduced: dict[int, int]
) -> None:
    """Reductions are in order on their stream: waiting for a later one is enough."""
    latest = max((need for need in step.event(i).waits_for if step.event(need).kind is Kind.REDUCE), default=-1)
    for index in used.intersection(step.event(i).reads):
        if reduced.get(index, len(step.schedule)) > latest:
            step.broken(rule, i, f"sends matrices of {step.bucket(index).name!r}, whose gradients are not reduced")


def replicas_are_added_up_once(step: Step) -> None:
    """A reduced shard that has replicas is added up over them once, after its reduction and before its finish.

    The update waits for that. Where there are no replicas, or nothing is sharded, there is no such sum. Where replicas
    share optimizer state, each update follows an exchange of what the others updated, and nowhere else.
    """
    rule = replicas_are_added_up_once
    shared = {e.writes for _, e in step.schedule.of(Kind.EXCHANGE) if e.stream == "replicas"}
    for i, event in step.schedule.of(Kind.UPDATE):
        bucket = step.bucket(event.bucket_index)
        if bucket.shares_state is not ((event.bucket_index,) in shared):
            what = "no exchange brings" if bucket.shares_state else "an exchange brings"
            step.broken(rule, i, f"updates a bucket for which {what} what other replicas updated")
        if bucket.shares_state and not bucket.adds_replicas:
            step.broken(rule, i, "updates a bucket that shares state with replicas, and has none")
    for index, trail in step.trails.items():
        bucket = step.bucket(index)
        reduced = added = None
        for i, what in trail:
            if what == Kind.REDUCE:
                if reduced is not None and added is None and bucket.adds_replicas:
                    step.broken(rule, reduced, "is reduced, but its replicas are never added up")
                reduced, added = i, None
            elif what == Kind.ALL_REDUCE:
                if not bucket.adds_replicas:
                    step.broken(rule, i, "adds up replicas of a bucket that has none")
                if reduced is None:
                    step.broken(rule, i, "adds up a shard that is not reduced before")
                if added is not None:
                    step.broken(rule, i, f"adds up again what event {added} adds up")
                added = i
            elif what == Kind.FINISH and reduced is not None:
                if bucket.adds_replicas and added is None:
                    step.broken(rule, i, "ends a reduction whose replicas are not added up")
                reduced = None
            elif what == Kind.UPDATE and added is not None and added not in step.event(i).waits_for:
                step.broken(rule, i, f"does not wait for event {added}, which adds up the replicas")
