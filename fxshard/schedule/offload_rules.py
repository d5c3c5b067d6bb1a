"""Rules for activations in the host's memory: out before they are overwritten, back before they are read."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from typing import Any

from fxshard.planner.memory import GRANULE, SlotRange
from fxshard.schedule.events import OF_HOST, STREAM, Event, Kind, Phase
from fxshard.schedule.offloads import HostCopy
from fxshard.schedule.step import COMPUTES_NOTHING, OF_NO_BUCKET, Step


def copies_are_those_of_the_graphs(step: Step) -> None:
    """Each copy to the host or back is one of an activation that its graph has, and leaves once that is computed.

    What forward offloads is what backward gets back; both know it by the same number.
    """
    rule = copies_are_those_of_the_graphs
    copies = {graph.phase: graph.copies for graph in step.schedule.graphs}
    out, back = (
        [(copy.op, copy.bytes, copy.dtype) for copy in copies.get(phase, ())]
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    if out != back or copies.get(Phase.EVAL):
        step.fails(rule, "what forward offloads is not what backward gets back")
    for graph in step.schedule.graphs:
        if not all(0 <= copy.node <= graph.nodes for copy in graph.copies):
            step.fails(rule, f"{graph.phase} copies something between nodes that its graph does not have")
    computed = left = 0
    for i, event in enumerate(step.schedule.events):
        computed += event.nodes if event.kind is Kind.COMPUTE and event.phase is Phase.FORWARD else 0
        if event.kind not in OF_HOST:
            continue
        if not 0 <= event.number < len(copies.get(event.phase, ())):
            step.broken(rule, i, f"is about activation {event.number}, which is none that its graph has on the host")
        source = copies[event.phase][event.number]
        step.has_right(rule, i, _wanted(event, source))
        if event.kind is Kind.OFFLOAD:
            if event.number != left:
                step.broken(rule, i, f"is activation {event.number}, but leaves as number {left}")
            left += 1
            if computed < source.node:
                step.broken(rule, i, "leaves before it is computed")


def _wanted(event: Event, source: HostCopy) -> dict[str, Any]:
    placed = event.kind in (Kind.OFFLOAD, Kind.RELOAD)  # on the host: ``host_slots_are_free``
    return {
        **{field: getattr(source, field) for field in ("op", "bytes", "dtype")},
        **{**OF_NO_BUCKET, "reads": (), "writes": (), "slot": event.slot if placed else None},
        **{**COMPUTES_NOTHING, "float8_flops": 0, "group": "", "stream": STREAM[event.kind]},
    }


def memory_is_kept_until_it_is_out(step: Step) -> None:
    """An activation that is offloaded keeps its memory until the copy is over: one release stands after it, and waits
    for it. So does what brings it back."""
    rule = memory_is_kept_until_it_is_out
    out, released = (_positions(step, rule, kind) for kind in (Kind.OFFLOAD, Kind.RELEASE))
    coming = _positions(step, rule, Kind.RELOAD)
    for number, at in out.items():
        if number not in released:
            step.broken(rule, at, "has no release: its memory would be taken while it is copied")
    for later in (released, coming):
        for number, at in later.items():
            if out.get(number, at) >= at:
                step.broken(rule, at, "is about an activation that is not on its way to the host")
            if out[number] not in step.event(at).waits_for:
                step.broken(rule, at, f"does not wait for event {out[number]}, which copies it to the host")


def offloaded_values_are_back_when_read(step: Step) -> None:
    """Backward reads an offloaded activation once it is back: one reload brings it, and one restore stands before the
    first read and waits for the reload."""
    rule = offloaded_values_are_back_when_read
    coming, back = (_positions(step, rule, kind) for kind in (Kind.RELOAD, Kind.RESTORE))
    copies = next((graph.copies for graph in step.schedule.graphs if graph.phase is Phase.BACKWARD), ())
    for number in range(len(copies)):
        if number not in coming or number not in back:
            step.fails(rule, f"backward reads activation {number} ({copies[number].op}), which is never brought back")
    computed = 0
    for i, event in enumerate(step.schedule.events):
        computed += event.nodes if event.kind is Kind.COMPUTE and event.phase is Phase.BACKWARD else 0
        if event.kind is not Kind.RESTORE:
            continue
        if coming[event.number] > i:
            step.broken(rule, i, "waits for an activation that nothing has begun to bring back")
        if coming[event.number] not in event.waits_for:
            step.broken(rule, i, f"does not wait for event {coming[event.number]}, which brings it back")
        if computed > copies[event.number].node:
            step.broken(rule, i, "comes after something reads what it waits for")


def host_slots_are_free(step: Step) -> None:
    """An activation has its place on the host to itself until it is back, and comes back from where it went."""
    rule = host_slots_are_free
    there: dict[int, SlotRange] = {}
    taken: list[tuple[int, int, int]] = []  # (offset, end, activation), disjoint and sorted
    for i, event in enumerate(step.schedule.events):
        slot = event.slot
        if event.kind is Kind.OFFLOAD:
            if slot is None or slot.offset < 0 or slot.offset % GRANULE or slot.bytes != event.bytes:
                step.broken(rule, i, f"has {slot} on the host for its {event.bytes} bytes")
            at = bisect(taken, (slot.offset, slot.end, event.number))
            for offset, end, number in taken[max(0, at - 1) : at + 1]:
                if offset < slot.end and slot.offset < end:
                    step.broken(rule, i, f"overwrites activation {number} on the host, which is not back yet")
            taken.insert(at, (slot.offset, slot.end, event.number))
            there[event.number] = slot
        elif event.kind is Kind.RELOAD and slot != there.get(event.number):
            step.broken(rule, i, f"comes back from {slot}, but went to {there.get(event.number)}")
        elif event.kind is Kind.RESTORE and event.number in there:
            back = there.pop(event.number)
            taken.remove((back.offset, back.end, event.number))


def _positions(step: Step, rule: Callable[[Step], None], kind: Kind) -> dict[int, int]:
    """{activation: where its one event of a kind stands}"""
    found: dict[int, int] = {}
    for i, event in step.schedule.of(kind):
        if event.number in found:
            step.broken(rule, i, f"is there a second time: event {found[event.number]} is the first")
        found[event.number] = i
    return found
