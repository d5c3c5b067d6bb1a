"""The events that must be over before an event starts, as the runtime enforces it with streams and tokens.

Streams are in order, so an event says only what they do not order by themselves. ``tests/test_ordering.py`` holds this
against what the runtime waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.memory import SlotRange
from fxshard.schedule.events import OF_HOST, OF_MODEL, Event, Kind, Phase

MARKS = (Kind.RESHARD, Kind.FINISH)
"""Events that only mark a place in the program. Compute does not stop for them: the next user of the memory waits."""


def needed_before(events: Sequence[Event]) -> list[tuple[int, ...]]:
    """The events that each event stands still for, if they are not over; earlier ones of its stream are, anyway.

    ``waits_for`` of a reshard or a finish says what ends there. So what waits for a finish waits for the reduction that
    it finishes.
    """
    needs: list[tuple[int, ...]] = []
    for event in events:
        found = event.waits_for if event.kind not in MARKS else ()
        for need in found:
            if 0 <= need < len(events) and events[need].kind is Kind.FINISH:
                found += events[need].waits_for
        needs.append(found)
    return needs


def with_dependencies(events: list[Event], buckets: Sequence[BucketPlan]) -> list[Event]:
    """Say for each event what must be over before it starts: what the runtime enforces with streams and tokens."""
    needs = dependencies(events, buckets)
    return [event.with_needs(waits_for) for event, waits_for in zip(events, needs, strict=True)]


def dependencies(events: Sequence[Event], buckets: Sequence[BucketPlan]) -> list[tuple[int, ...]]:
    """``waits_for`` of each event, from the order of events, their buckets and their places in the arena."""
    latest: dict[tuple[Kind, int], int] = {}
    last_write: dict[int, int] = {}
    last_read: dict[int, int] = {}
    last_reduces: dict[int, Kind] = {}  # the last of each stream, which is in order
    travelling: dict[tuple[str, ...], int] = {}  # {matrices: the last event of their exchange}
    returned: dict[int, int] = {}
    computed: int | None = None  # the last event of the compute stream
    ran: int | None = None  # the last of them that is more than a mark
    started: dict[tuple[Phase, int], int] = {}  # collectives of the model's own
    copied: dict[tuple[Kind, int], int] = {}  # what moves activations to the host and back
    scaled: int | None = None  # the scales of weights in float8, which a program begins with
    places: list[tuple[int, SlotRange]] = []  # (position of the event that frees it, what is free then)
    ahead = {  # what the step before gathered
        e.bucket_index: i for i, e in enumerate(events) if e.kind is Kind.UNSHARD and e.phase is Phase.OPTIMIZER
    }
    found: list[tuple[int, ...]] = []
    for i, event in enumerate(events):
        index, needs = event.bucket_index, set()
        if event.kind is Kind.WAIT:
            needs.add(latest.get((Kind.UNSHARD, index)))
        elif event.kind is Kind.COMPUTE:
            needs |= {latest.get((Kind.WAIT, bucket)) for bucket in event.reads}
            needs |= {latest.get((Kind.GRAD, bucket)) for bucket in event.writes}
            last_write.update(dict.fromkeys(event.writes, i))
            last_read.update(dict.fromkeys(event.reads, i))
        elif event.kind in OF_MODEL:
            needs |= {latest.get((Kind.WAIT, bucket)) for bucket in event.reads}
            needs.add(ran if event.kind is Kind.COLLECTIVE else started.get((event.phase, event.number)))
            started.setdefault((event.phase, event.number), i)
            last_read.update(dict.fromkeys(event.reads, i))
        elif event.kind in OF_HOST:
            before = {Kind.RELEASE: Kind.OFFLOAD, Kind.RELOAD: Kind.OFFLOAD, Kind.RESTORE: Kind.RELOAD}.get(event.kind)
            needs.add(copied.get((before, event.number)) if before is not None else None)
            needs.add(ran if event.stream != "compute" else None)  # what it reads, or whose memory it takes
            copied[event.kind, event.number] = i
        elif event.kind is Kind.RESHARD:
            needs |= {last_read.get(index), latest.get((Kind.WAIT, index))}
        elif event.kind in (Kind.REDUCE, Kind.ACCUMULATE):
            needs |= {last_write.get(index), latest.get((Kind.GRAD, index))}
        elif event.kind in (Kind.ALL_REDUCE, Kind.FINISH):
            needs |= {latest.get((Kind.REDUCE, index)), latest.get((Kind.ACCUMULATE, index))}
        elif event.kind is Kind.UPDATE:  # backward ends when all its reductions have
            needs |= {latest.get((Kind.REDUCE, index)), latest.get((Kind.ALL_REDUCE, index)), returned.get(index)}
            needs |= last_reduces.keys()
        elif event.kind is Kind.EXCHANGE:
            needs |= {*last_reduces, computed}  # compute puts together what travels
            returned.update(dict.fromkeys(event.writes, i))
        if event.kind is Kind.UNSHARD and event.phase is Phase.OPTIMIZER:
            needs.add(latest.get((Kind.UPDATE, index)))
        elif event.kind is Kind.UNSHARD:
            needs.add(scaled)
        scaled = i if event.kind is Kind.SCALES else scaled
        if (
            event.phase is Phase.OPTIMIZER
            and event.kind in (Kind.COMPUTE, Kind.EXCHANGE)
            and event.stream != "replicas"
        ):
            needs.add(travelling.get(event.params))
            travelling[event.params] = i
        if event.kind in (Kind.REDUCE, Kind.ALL_REDUCE):
            last_reduces = {at: kind for at, kind in last_reduces.items() if kind is not event.kind} | {i: event.kind}
        if event.kind in (Kind.UNSHARD, Kind.GRAD) and event.slot is not None:
            needs |= {freed for freed, slot in places if slot.overlaps(event.slot)}
        freed: tuple[int, SlotRange | None] | None = None
        if event.kind is Kind.WAIT:
            # What was staged is quantized by then, as a part of the gather; a bucket that stays has no slot after.
            opened = latest.get((Kind.UNSHARD, index))
            if opened is not None and buckets[index].staged_in_arena:
                freed = opened, events[opened].slot
        elif event.kind in MARKS:
            opened = latest.get((Kind.UNSHARD if event.kind is Kind.RESHARD else Kind.GRAD, index), ahead.get(index))
            if opened is not None:
                at = i if event.kind is Kind.RESHARD else latest.get((Kind.REDUCE, index), i)
                freed = at, events[opened].slot
        if freed is not None and freed[1] is not None:
            places = [(at, slot) for at, slot in places if not slot.overlaps(freed[1])]
            places.append((freed[0], freed[1]))
        latest[event.kind, index] = i
        computed = i if event.stream == "compute" else computed
        ran = i if event.stream == "compute" and event.kind not in MARKS else ran
        found.append(tuple(sorted(need for need in needs if need is not None)))
    return found
