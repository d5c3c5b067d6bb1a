"""What must hold where shards have replicas (HSDP): the rule of ``verify`` about sums over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxshard.schedule.events import Kind

if TYPE_CHECKING:
    from fxshard.schedule.step import Step


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
