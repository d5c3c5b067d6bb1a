"""Mutations of what follows from the table of buckets, the domain and the graphs; ``test_mutants`` generates more."""

from dataclasses import replace

import torch

from fxshard.planner.memory import SlotRange
from fxshard.schedule.events import TENSOR, Kind, Phase
from fxshard.schedule.schedule import Schedule
from tests.inspect.mutations.editing import BACKWARD, FORWARD, OPTIMIZER, Broken, at_event, breaks, changed
from tests.inspect.schedules import change, place, relinked, zero3


def _with_bucket(schedule: Schedule, i: int, **fields: object) -> Schedule:
    bucket = replace(schedule.buckets[i], **fields)  # type: ignore[arg-type]
    return replace(schedule, buckets=(*schedule.buckets[:i], bucket, *schedule.buckets[i + 1 :]))


@breaks(
    "header_is_possible",
    no_ranks=lambda: (replace(zero3(), ranks=-1), None),
    no_such_stage=lambda: (replace(zero3(), zero=10**18), None),
)
def gradients_divided_by_another_number() -> Broken:
    schedule = zero3()
    return _with_bucket(schedule, 1, domain=replace(schedule.buckets[1].domain, divisor=7)), None


@breaks(
    "buckets_are_possible",
    a_bucket_with_anothers_number=lambda: (_with_bucket(zero3(), 1, index=0), None),
    a_bucket_with_state_in_no_format=lambda: (_with_bucket(zero3(), 1, state="4bit"), None),
)
def a_bucket_laid_out_over_other_ranks() -> Broken:
    schedule = zero3()
    return _with_bucket(schedule, 1, layout=replace(schedule.buckets[1].layout, ranks=10**9)), None


@breaks("buckets_are_possible")
def a_matrix_that_is_no_part_of_the_whole() -> Broken:
    schedule = zero3(muon=True, tensor=2)
    cuts = schedule.buckets[1].cuts
    assert cuts is not None
    return _with_bucket(schedule, 1, cuts=replace(cuts, wholes=(replace(cuts.wholes[0], shape=(48, 16)),))), None


@breaks("optimizer_follows_from_the_buckets")
def matrices_cut_over_other_ranks() -> Broken:
    """All of them, as they could be; but that many ranks exchange other bytes."""
    schedule = zero3(muon=True, tensor=2)
    for i, bucket in enumerate(schedule.buckets):
        assert bucket.cuts is not None
        (whole,) = bucket.cuts.wholes
        group = replace(bucket.cuts.group, ranks=4)
        cuts = replace(bucket.cuts, group=group, wholes=(replace(whole, shape=(64, 16)),))
        schedule = _with_bucket(schedule, i, cuts=cuts)
    return schedule, next(i for i, event in schedule.of(Kind.EXCHANGE) if event.stream == TENSOR)


breaks("phases_are_in_order", a_reduction_in_forward=lambda: changed(zero3(), Kind.REDUCE, 2, BACKWARD, phase=FORWARD))
breaks(
    "events_match_their_buckets",
    a_gather_of_other_bytes=lambda: at_event(
        zero3(), (Kind.UNSHARD, 1, FORWARD), bytes=lambda gather: gather.bytes - 64
    ),
    # They rest on the device, and nothing has to hold them for it.
    an_update_that_brings_moments_from_nowhere=lambda: changed(zero3(), Kind.UPDATE, 1, OPTIMIZER, peak=512),
    a_reduction_in_another_dtype=lambda: changed(zero3(), Kind.REDUCE, 1, BACKWARD, dtype=torch.bfloat16),
    a_name_and_a_number_that_disagree=lambda: changed(zero3(), Kind.WAIT, 1, FORWARD, bucket="2"),
)


@breaks(
    "waits_are_where_their_gathers_are",
    a_wait_that_reads_elsewhere=lambda: at_event(
        zero3(), (Kind.WAIT, 1, FORWARD), slot=lambda wait: SlotRange(wait.slot.offset + 512, wait.slot.bytes)
    ),
)
def a_resident_bucket_that_nothing_refreshes() -> Broken:
    schedule = zero3(zero=1)
    gather, wait = place(schedule, Kind.UNSHARD, 1, FORWARD), place(schedule, Kind.WAIT, 1, FORWARD)
    return relinked(schedule, [event for i, event in enumerate(schedule.events) if i != gather]), wait - 1


@breaks("waits_and_gradients_are_used")
def a_wait_that_nothing_reads() -> Broken:
    schedule = zero3()
    at = place(schedule, Kind.WAIT, 1, FORWARD)
    reader = next(i for i, event in enumerate(schedule.events) if i > at and event.reads)
    changed = change(schedule, reader, reads=())
    return relinked(changed, list(changed.events)), at


@breaks("optimizer_follows_from_the_buckets")
def an_update_of_other_bytes() -> Broken:
    schedule = zero3(muon=True)
    at = next(i for i, _ in schedule.of(Kind.EXCHANGE))
    return change(schedule, at, bytes=schedule.events[at].bytes + 4), at


@breaks("optimizer_follows_from_the_buckets")
def an_update_too_few() -> Broken:
    schedule = zero3(muon=True)
    kinds = {Kind.EXCHANGE, Kind.COMPUTE}
    events = [event for event in schedule.events if event.phase is not OPTIMIZER or event.kind not in kinds]
    changed = relinked(schedule, events)
    # Without flops it would be another optimizer's step, which is fine.
    at = next(i for i, _ in changed.of(Kind.UPDATE))
    return change(changed, at, flops=17), at


@breaks("computes_are_those_of_the_graphs")
def compute_that_is_missing() -> Broken:
    schedule = zero3()
    read = next(i for i, event in enumerate(schedule.events) if event.writes)
    return relinked(schedule, [event for i, event in enumerate(schedule.events) if i != read]), None


@breaks("computes_are_those_of_the_graphs")
def compute_without_its_writes() -> Broken:
    schedule = zero3()
    first = next(i for i, event in enumerate(schedule.events) if event.writes)
    changed = change(schedule, first, writes=())
    return relinked(changed, list(changed.events)), first


breaks(
    "memory_is_what_it_says",
    more_at_rest_than_there_is=lambda: (replace(zero3(), resident_bytes=zero3().resident_bytes + 4), None),
    an_arena_that_is_too_large=lambda: (replace(zero3(), arena_bytes=zero3().arena_bytes + 512), None),
)


@breaks("waits_for_follows_from_the_order")
def compute_that_waits_for_nothing() -> Broken:
    schedule = zero3()
    at = next(i for i, _ in schedule.of(Kind.COMPUTE, phase=Phase.FORWARD))
    return change(schedule, at, waits_for=()), at
