"""Mutations of a step that has two activations on the host between forward and backward."""

from dataclasses import replace

import torch

from fxshard.planner.memory import SlotRange
from fxshard.schedule.events import STREAM, Event, Kind, Phase
from fxshard.schedule.offloads import HostCopy
from fxshard.schedule.schedule import Schedule
from tests.inspect.mutations.editing import (
    BACKWARD,
    FORWARD,
    Broken,
    added,
    at_number,
    breaks,
    changed,
    not_waiting_for,
    numbered,
    without,
)
from tests.inspect.schedules import zero3

SIZE = 4096


def offloading() -> Schedule:
    """A step of three layers: what the first two compute leaves while the next one computes, and comes back one layer
    before it is read."""
    schedule = zero3(3)
    forward, backward = schedule.graphs
    out = tuple(HostCopy("layers.* mm", SIZE, torch.float32, node) for node in (1, 2))
    back = tuple(HostCopy("layers.* mm", SIZE, torch.float32, node) for node in (6, 3))
    schedule = replace(schedule, graphs=(replace(forward, copies=out), replace(backward, copies=back)))
    for kind, phase, number, node in (
        (Kind.OFFLOAD, FORWARD, 0, 1),
        (Kind.OFFLOAD, FORWARD, 1, 2),
        (Kind.RELEASE, FORWARD, 0, 2),
        (Kind.RELEASE, FORWARD, 1, 3),
        (Kind.RELOAD, BACKWARD, 1, 0),
        (Kind.RELOAD, BACKWARD, 0, 3),
        (Kind.RESTORE, BACKWARD, 1, 3),
        (Kind.RESTORE, BACKWARD, 0, 6),
    ):
        schedule = added(schedule, _after(schedule, phase, node), _event(kind, phase, number))
    return schedule


def _event(kind: Kind, phase: Phase, number: int) -> Event:
    slot = SlotRange(number * SIZE, SIZE) if kind in (Kind.OFFLOAD, Kind.RELOAD) else None
    about = (SIZE, torch.float32, "", STREAM[kind], "by hand", slot)
    return Event(kind, phase, "", -1, (), *about, op="layers.* mm", number=number)


def _after(schedule: Schedule, phase: Phase, nodes: int) -> int:
    """The position after so many nodes of a phase, and after copies that stand there already."""
    stretches = [i for i, _ in schedule.of(Kind.COMPUTE, phase=phase)]
    at = stretches[nodes - 1] + 1 if nodes else next(i for i, e in enumerate(schedule.events) if e.phase is phase)
    while schedule.events[at].number >= 0:
        at += 1
    return at


breaks(
    "copies_are_those_of_the_graphs",
    leaves_before_it_is_computed=lambda: at_number(
        offloading(), Kind.OFFLOAD, 0, to=min(i for i, _ in offloading().of(Kind.COMPUTE))
    ),
    of_other_bytes=lambda: changed(offloading(), Kind.RELOAD, 1, bytes=SIZE // 2),
    of_an_activation_that_nobody_knows=lambda: changed(offloading(), Kind.OFFLOAD, 1, number=7),
    on_the_compute_stream=lambda: changed(offloading(), Kind.OFFLOAD, 1, stream="compute"),
)


@breaks("copies_are_those_of_the_graphs")
def backward_wants_more_than_forward_offloads() -> Broken:
    schedule = offloading()
    forward, backward = schedule.graphs
    return replace(schedule, graphs=(forward, replace(backward, copies=(*backward.copies, backward.copies[0])))), None


@breaks("memory_is_kept_until_it_is_out")
def freed_while_it_is_copied() -> Broken:
    """Without a release nothing keeps compute from taking the memory that is still being copied."""
    schedule = offloading()
    return without(schedule, numbered(schedule, Kind.RELEASE, 0)), numbered(schedule, Kind.OFFLOAD, 0)


@breaks(
    "memory_is_kept_until_it_is_out",
    freed_before_it_is_copied=lambda: at_number(
        offloading(), Kind.RELEASE, 0, to=numbered(offloading(), Kind.OFFLOAD, 0)
    ),
    freed_without_waiting_for_the_copy=lambda: changed(offloading(), Kind.RELEASE, 1, waits_for=()),
)
def comes_back_before_it_is_out() -> Broken:
    schedule = offloading()
    return not_waiting_for(schedule, numbered(schedule, Kind.RELOAD, 1), numbered(schedule, Kind.OFFLOAD, 1))


breaks(
    "offloaded_values_are_back_when_read",
    read_before_it_is_back=lambda: at_number(
        offloading(), Kind.RESTORE, 0, to=[i for i, _ in offloading().of(Kind.COMPUTE, phase=BACKWARD)][6]
    ),
    read_without_waiting=lambda: changed(offloading(), Kind.RESTORE, 1, waits_for=()),
    waited_for_before_it_starts=lambda: at_number(
        offloading(), Kind.RESTORE, 0, to=numbered(offloading(), Kind.RELOAD, 0)
    ),
    never_brought_back=lambda: (without(offloading(), numbered(offloading(), Kind.RELOAD, 0)), None),
    never_waited_for=lambda: (without(offloading(), numbered(offloading(), Kind.RESTORE, 0)), None),
)
breaks(
    "host_slots_are_free",
    host_memory_taken_before_it_is_back=lambda: changed(offloading(), Kind.OFFLOAD, 1, slot=SlotRange(0, SIZE)),
    comes_back_from_elsewhere=lambda: changed(offloading(), Kind.RELOAD, 0, slot=SlotRange(SIZE, SIZE)),
    too_small_a_place=lambda: changed(offloading(), Kind.OFFLOAD, 0, slot=SlotRange(0, SIZE // 2)),
)
