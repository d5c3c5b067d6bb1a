"""What must hold where matrices travel to the rank that orthogonalizes them."""

from __future__ import annotations

from collections.abc import Callable

from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.step import Step


def exchanges_go_there_and_back(step: Step) -> None:
    """Matrices travel after the reduction of their gradients, are computed, come back, and then update their buckets.

    Each waits for the one before: there and back run during compute.
    """
    rule = exchanges_go_there_and_back
    last: dict[tuple[str, ...], int] = {}
    returned: dict[int, int] = {}
    reduced: dict[int, int] = {}
    # A bucket that no graph uses travels too, as zeros: nothing reduces or updates it.
    used = {event.bucket_index for _, event in step.schedule.of(Kind.REDUCE)}
    for i, event in enumerate(step.schedule.events):
        if event.kind is Kind.REDUCE:
            reduced[event.bucket_index] = i
        elif event.phase is Phase.OPTIMIZER and event.kind in (Kind.EXCHANGE, Kind.COMPUTE):
            before = last.get(event.params)
            if before is not None and before not in event.waits_for:
                step.broken(rule, i, f"does not wait for event {before}, which is about the same matrices")
            if event.kind is Kind.EXCHANGE and before is None:
                _after_reductions(step, rule, i, used, reduced)
            elif before is None or step.event(before).kind is event.kind:
                step.broken(rule, i, "is about matrices that have not been sent, or not been computed")
            last[event.params] = i
            returned.update({index: i for index in event.writes if index in used})
        elif event.kind is Kind.UPDATE:
            back = returned.pop(event.bucket_index, None)
            if back is not None and back not in event.waits_for:
                step.broken(rule, i, f"does not wait for event {back}, which brings its matrices back")
    for i in last.values():
        if not step.event(i).writes:
            step.broken(rule, i, "is about matrices that never come back")
    for i in returned.values():
        step.broken(rule, i, "brings back matrices of a bucket that nothing updates after it")


def _after_reductions(
    step: Step, rule: Callable[[Step], None], i: int, used: set[int], reduced: dict[int, int]
) -> None:
    """Reductions are in order on their stream: waiting for a later one is enough."""
    latest = max((need for need in step.event(i).waits_for if step.event(need).kind is Kind.REDUCE), default=-1)
    for index in used.intersection(step.event(i).reads):
        if reduced.get(index, len(step.schedule)) > latest:
            step.broken(rule, i, f"sends matrices of {step.bucket(index).name!r}, whose gradients are not reduced")
