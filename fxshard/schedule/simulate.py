"""How long a step takes, and what it holds, before there is a machine to run it on.

Streams, each in program order: ``compute``, ``gather`` (unshard), ``reduce``, with HSDP ``replicas`` (all_reduce), with
Muon under tensor parallelism ``tensor``, and one for each process group that the model communicates in itself.
The host runs ahead, so an event starts when its stream is free and everything in ``waits_for`` is over; where it stands
in the program only orders it on its stream. With ``shared_link`` collectives that are bound by the same links (inside
nodes, or between them) take turns, in the order in which they are ready; without, each has the full bandwidth. See
docs/simulation.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from fxshard.planner.collectives import (
    all_reduce_seconds,
    all_to_all_seconds,
    gather_seconds,
    link,
    reduce_seconds,
    replicas_seconds,
    update_seconds,
)
from fxshard.planner.hardware import Hardware
from fxshard.planner.hardware import hardware as known
from fxshard.schedule.dependencies import needed_before
from fxshard.schedule.events import OF_HOST, TENSOR, Event, Kind, Phase
from fxshard.schedule.profile import Profile, as_durations
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.step import GIVEN_BACK_BY, ScheduleError, Step

COMPUTE, REPLICAS = "compute", "replicas"
"""Streams."""

SETTLING = 4
"""Steps to run until one starts as it ends: the second does, unless gathers outlast the whole optimizer phase."""


@dataclass(frozen=True)
class Span:
    """When an event runs. A wait spans the time in which compute stands still for it."""

    index: int
    stream: str
    start: float
    stop: float


@dataclass(frozen=True)
class Simulation:
    """One simulated step.

    >>> print(f"{schedule.simulate('h200').step_seconds:.3f} s")
    """

    step_seconds: float
    compute_seconds: float
    """Time in which compute and updates run."""
    communication_seconds: float
    """Time in which collectives, and copies to the host and back, run, added up."""
    exposed_seconds: float
    """Time in which compute stands still: ``step_seconds - compute_seconds``."""
    bound_seconds: float
    """No order of events is faster: the larger of compute and what the network, or the link to the host, carries."""
    spans: tuple[Span, ...]
    """One for each event, in the same order."""
    memory: tuple[tuple[float, int], ...]
    """(from this time on, bytes): what a rank holds at rest, what is alive in the arena, and activations."""
    peak_bytes: int

    @property
    def overlap(self) -> float:
        """The share of communication that compute hides; 1 where there is none."""
        if self.communication_seconds == 0:
            return 1.0
        return min(1.0, max(0.0, 1 - self.exposed_seconds / self.communication_seconds))


def simulate(
    schedule: Schedule,
    hardware: Hardware | str,
    *,
    durations: Mapping[int, float] | Profile | None = None,
    shared_link: bool = True,
    overlap: bool = True,
    steady: bool = True,
) -> Simulation:
    """Run a schedule on paper. ``durations`` (seconds by position, or a recorded profile) replace estimates.

    Without ``overlap`` compute and collectives take turns, as they do where ranks share one device.
    With ``steady`` the step is one of many: what the optimizer phase gathers for the next step runs while this one ends
    and the next begins. Without, the step is the first, and gathers that at its start.
    """
    machine = known(hardware)
    seconds = event_seconds(schedule, machine)
    links = [_link(event, schedule, machine, shared_link) for event in schedule.events]
    for i, given in as_durations(schedule, durations).items():
        seconds[i] = given
    carried = Step(schedule).carried
    run = _run(schedule, seconds, links, overlap, _before_first_step(carried, seconds))
    if steady and carried:
        for _ in range(SETTLING):
            start = run.left_over(carried)
            again = _run(schedule, seconds, links, overlap, start)
            settled = again.left_over(carried) == start
            run = again
            if settled:
                break

    busy: Counter[str] = Counter()
    for taken, duration in zip(links, seconds, strict=True):
        busy[taken] += duration  # type: ignore[assignment]
    compute = busy.pop(COMPUTE, 0.0)
    memory = _memory(schedule, run, carried)
    return Simulation(
        step_seconds=run.stop,
        compute_seconds=compute,
        communication_seconds=sum(busy.values()),
        exposed_seconds=run.stop - compute,
        bound_seconds=max([compute, *busy.values()]) if overlap else compute + sum(busy.values()),
        spans=tuple(run.spans),
        memory=memory,
        peak_bytes=max(held for _, held in memory),
    )


# -- durations ---------------------------------------------------------------------------------------------------------


def event_seconds(schedule: Schedule, hardware: Hardware) -> list[float]:
    """How long each event keeps its stream busy, by the cost model. Those that only mark a place take no time."""
    usual = _usual_dtype(schedule)
    return [_seconds(event, schedule, hardware, usual) for event in schedule.events]


def _seconds(event: Event, schedule: Schedule, hardware: Hardware, usual: torch.dtype) -> float:
    if event.kind is Kind.COMPUTE:
        dtype = _dtype(event, schedule, usual)
        return hardware.compute_seconds(event.flops, event.traffic, dtype, event.float8_flops)
    if event.kind is Kind.UPDATE:
        own = hardware.compute_seconds(event.flops, event.traffic, torch.bfloat16)  # Newton–Schulz multiplies in it
        return update_seconds(schedule.buckets[event.bucket_index], own, hardware)
    if event.kind is Kind.ACCUMULATE:
        return hardware.compute_seconds(event.flops, event.traffic, event.dtype)
    if event.kind is Kind.EXCHANGE and event.stream == REPLICAS:
        bucket = schedule.buckets[event.reads[0]]
        return replicas_seconds(bucket, event.bytes * bucket.layout.ranks, hardware) / 2  # half of an all-reduce
    if event.kind is Kind.EXCHANGE and event.stream == TENSOR:
        return schedule.group_of(event).seconds("all_to_all", event.bytes, hardware)
    if event.kind is Kind.EXCHANGE:
        bucket = schedule.buckets[event.reads[0]]
        return all_to_all_seconds(event.bytes, bucket.layout.ranks, hardware, stride=bucket.domain.stride)
    if event.kind is Kind.COLLECTIVE:
        return schedule.group_of(event).seconds(event.op, event.bytes, hardware)
    if event.kind in (Kind.OFFLOAD, Kind.RELOAD):
        return hardware.host_seconds(event.bytes)
    if event.kind is Kind.SCALES:
        bucket = schedule.buckets[event.reads[0]]
        combined = all_reduce_seconds(event.bytes, bucket.domain.ranks, hardware, stride=bucket.domain.stride)
        return combined + hardware.compute_seconds(0, event.traffic, event.dtype)
    if event.kind is Kind.UNSHARD:
        bucket = schedule.buckets[event.bucket_index]
        # What is resident and frozen is gathered once, before the first step.
        return 0.0 if bucket.resident and not bucket.trainable else gather_seconds(bucket, event.bytes, hardware)
    if event.kind is Kind.REDUCE:
        return reduce_seconds(schedule.buckets[event.bucket_index], event.bytes, hardware)
    if event.kind is Kind.ALL_REDUCE:
        bucket = schedule.buckets[event.bucket_index]
        return replicas_seconds(bucket, event.bytes * bucket.layout.ranks, hardware)
    return 0.0


def _dtype(event: Event, schedule: Schedule, usual: torch.dtype) -> torch.dtype:
    """The dtype that a stretch of compute multiplies in: that of its parameters, else the model's usual one."""
    touched = event.reads or event.writes
    return schedule.buckets[touched[0]].param_dtype if touched else usual


def _usual_dtype(schedule: Schedule) -> torch.dtype:
    elements: Counter[torch.dtype] = Counter()
    for bucket in schedule.buckets:
        elements[bucket.param_dtype] += bucket.layout.numel
    return elements.most_common(1)[0][0] if elements else torch.float32


def _link(event: Event, schedule: Schedule, hardware: Hardware, shared: bool) -> str:
    """The resource that an event keeps busy: for collectives the links that they share, for others their stream."""
    stream = event.stream
    if stream == COMPUTE or event.kind in OF_HOST or not shared:
        return stream
    if event.kind is Kind.COLLECTIVE or stream == TENSOR:
        return schedule.group_of(event).link(hardware)
    bucket = schedule.buckets[event.reads[0] if event.kind is Kind.EXCHANGE else event.bucket_index]
    return link(bucket, hardware, replicas=stream == REPLICAS)


# -- time --------------------------------------------------------------------------------------------------------------


_There = Mapping[int, float]
"""The start of a step: when each bucket gathered in the step before is there, after which the network is free."""


def _before_first_step(carried: Mapping[int, int], seconds: list[float]) -> _There:
    """The gathers run one after another, in their order, before anything else."""
    order = sorted(carried, key=carried.__getitem__)
    return dict(zip(order, accumulate(seconds[carried[index]] for index in order), strict=True))


@dataclass(frozen=True)
class _Run:
    """When everything happened, and when the step was over: gathers for the next one may still be under way."""

    spans: list[Span]
    stop: float

    def left_over(self, carried: Mapping[int, int]) -> _There:
        """The start of the step after this one, on its own clock."""
        return {index: max(0.0, self.spans[i].stop - self.stop) for index, i in carried.items()}


def _run(schedule: Schedule, seconds: list[float], links: list[str], overlap: bool, there: _There) -> _Run:
    """Take, again and again, the event that can start first: all others start later, so nothing is overtaken."""
    events = schedule.events
    needs, earliest = needed_before(events), _earliest(events, there)
    streams: dict[str, list[int]] = {stream: [] for stream in dict.fromkeys(event.stream for event in events)}
    for i in range(len(events) - 1, -1, -1):  # the next event of a stream is its last entry
        streams[events[i].stream].append(i)
    free = dict.fromkeys([*streams, *links], 0.0)  # streams, and links between ranks
    network_free = max(there.values(), default=0.0)
    free |= {links[i]: network_free for i, event in enumerate(events) if _for_next_step(event)}
    ready: dict[str, float | None] = dict.fromkeys(streams)  # when the next event of each may start, once that is known
    stops: list[float | None] = [None] * len(events)
    spans: list[Span] = []
    for _ in events:
        first: tuple[float, int, str] | None = None
        for stream, queue in streams.items():
            if not queue:
                continue
            time = ready[stream]
            if time is None:
                time = ready[stream] = _ready(queue[-1], needs, earliest, stops)
            if time is not None:
                candidate = (max(time, free[stream], free[links[queue[-1]]]), queue[-1], stream)
                first = candidate if first is None else min(first, candidate)
        if first is None:
            raise _stuck(schedule, min(queue[-1] for queue in streams.values() if queue))
        begin, i, stream = first
        stop = begin + seconds[i]
        stands_still = events[i].kind in (Kind.WAIT, Kind.GRAD, Kind.AWAIT, Kind.RELEASE, Kind.RESTORE)
        spans.append(Span(i, stream, free[stream] if stands_still else begin, stop))
        stops[i] = free[stream] = free[links[i]] = stop
        if not overlap:
            free = dict.fromkeys(free, stop)
        streams[stream].pop()
        ready[stream] = None

    spans.sort(key=lambda span: span.index)
    own = (span.stop for span, event in zip(spans, events, strict=True) if not _for_next_step(event))
    return _Run(spans, max(own, default=0.0))


def _for_next_step(event: Event) -> bool:
    return event.kind is Kind.UNSHARD and event.phase is Phase.OPTIMIZER


def _earliest(events: tuple[Event, ...], there: _There) -> dict[int, float]:
    """{position of the first wait for it: when a bucket gathered in the step before is there}"""
    times: dict[int, float] = {}
    left = dict(there)
    for i, event in enumerate(events):
        if not left:
            break
        if event.kind is Kind.WAIT and event.bucket_index in left:
            times[i] = left.pop(event.bucket_index)
    return times


def _ready(i: int, needs: list[tuple[int, ...]], earliest: dict[int, float], stops: list[float | None]) -> float | None:
    """When everything an event waits for is over; None while that is not known."""
    time = earliest.get(i, 0.0)
    for need in needs[i]:
        stop = stops[need] if 0 <= need < len(stops) else None
        if stop is None:
            return None
        if stop > time:
            time = stop
    return time


def _stuck(schedule: Schedule, i: int) -> ScheduleError:
    event = schedule.events[i]
    return ScheduleError(
        f"event {i} ({event.phase} {event.kind} of {event.bucket!r}) can never start: it waits for "
        f"{list(event.waits_for)}, and some of these come only after it; Schedule.verify() says more",
        "simulate",
        i,
    )


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory(schedule: Schedule, run: _Run, carried: Mapping[int, int]) -> tuple[tuple[float, int], ...]:
    """The bytes that a rank holds over time.

    A gathered bucket counts from the start of its gather to its reshard, a gradient bucket from where it is taken to
    the end of its reduction, activations as they are after the last stretch of compute.
    """
    changes: list[tuple[float, int]] = []
    held: dict[tuple[Kind, int], int] = {}
    reduced: dict[int, float] = {}
    activations = 0
    for index, i in carried.items():
        slot = schedule.events[i].slot
        if slot is not None:
            held[Kind.RESHARD, index] = slot.bytes
            changes.append((0.0, slot.bytes))
    for event, span in zip(schedule.events, run.spans, strict=True):
        key = (event.kind, event.bucket_index)
        if event.kind in GIVEN_BACK_BY and event.slot is not None:
            if span.start < run.stop:
                held[GIVEN_BACK_BY[event.kind], event.bucket_index] = event.slot.bytes
                changes.append((span.stop if event.kind is Kind.GRAD else span.start, event.slot.bytes))
        elif key in held:
            changes.append((max(span.stop, reduced.get(event.bucket_index, 0.0)), -held.pop(key)))
        elif event.kind is Kind.REDUCE:
            reduced[event.bucket_index] = span.stop
        if event.kind in (Kind.COMPUTE, Kind.UPDATE) and event.held != activations:
            changes.append((span.stop, event.held - activations))
            activations = event.held

    # What is given back and taken at the same time is the same memory: give back first.
    curve = {0.0: schedule.resident_bytes}
    total = schedule.resident_bytes
    for time, change in sorted(changes):
        total += change
        curve[time] = total
    return tuple(curve.items())
