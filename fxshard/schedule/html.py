"""A schedule as one self-contained HTML page: timeline, memory and buckets, nothing loaded from the network."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch

from fxshard.plan.buckets import BucketPlan
from fxshard.schedule.events import Event, Kind
from fxshard.schedule.schedule import COMMUNICATES, Schedule, size
from fxshard.schedule.trace import stream_order

if TYPE_CHECKING:
    from fxshard.schedule.simulate import Simulation

COMPUTES = (Kind.COMPUTE, Kind.UPDATE)

Drawn = tuple[int, str, float, float]
"""A bar of the timeline: event, stream, start, stop. What starts and stops at once is drawn as a mark."""


def to_html(schedule: Schedule, simulation: Simulation | None = None) -> str:
    """The page. With a simulation its axis is time; without one it counts events.

    >>> Path("schedule.html").write_text(to_html(schedule, simulate(schedule, hardware("h200"))))
    """
    template = resources.files("fxshard.schedule").joinpath("page.html").read_text(encoding="utf-8")
    ranks = f"{schedule.ranks} rank" + "s" * (schedule.ranks != 1) + schedule.replicated
    data = {
        "title": f"ZeRO-{schedule.zero} on {ranks}",
        "subtitle": f"{len(schedule.buckets)} buckets · {len(schedule.events)} events · digest {schedule.digest}",
        "simulated": simulation is not None,
        "figures": list(_figures(schedule, simulation)),
        "budget": schedule.budget,
        "resident": schedule.resident_bytes,
        "peak": simulation.peak_bytes if simulation is not None else schedule.peak_bytes,
        **_timeline(schedule, simulation),
        **_events(schedule.events),
        "buckets": [_bucket(bucket) for bucket in schedule.buckets],
        "order": _by_first_use(schedule),
    }
    title = html.escape(f"{data['title']} · fxshard schedule")
    return template.replace("$TITLE", title, 1).replace("$DATA", embedded(data), 1)


def embedded(data: Any) -> str:
    """JSON that may stand in a ``<script>``: no character in it can end the element or begin another."""
    text = json.dumps(data, separators=(",", ":"))  # ASCII, so line separators are escaped already
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _figures(schedule: Schedule, simulation: Simulation | None) -> Iterator[tuple[str, str, str]]:
    """(name, value, note) of the boxes on top."""
    if simulation is not None:
        step, exposed, bound = simulation.step_seconds, simulation.exposed_seconds, simulation.bound_seconds
        slower = f"{step / bound - 1:.1%} above the bound of {duration(bound)}" if bound else ""
        yield "step time, simulated", duration(step), slower
        yield "exposed communication", duration(exposed), f"{exposed / step:.1%} of the step" if step else ""
        busy = f"{simulation.compute_seconds / step:.1%} of the step" if step else ""
        yield "compute", duration(simulation.compute_seconds), busy
        communication = simulation.communication_seconds
        hidden = f"{max(0.0, 1 - exposed / communication):.1%} hidden by compute" if communication else ""
        yield "communication", duration(communication), hidden
        yield "peak memory, simulated", size(simulation.peak_bytes), "with activations"
    held = f"{size(schedule.resident_bytes)} at rest + {size(schedule.arena_bytes)} arena"
    yield "shards and arena", size(schedule.peak_bytes), held + _budget(schedule)
    gathers = sum(1 for _ in schedule.of(Kind.UNSHARD))
    reductions = sum(1 for _ in schedule.of(Kind.REDUCE))
    yield "communication per step", size(schedule.comm_bytes), f"{gathers} gathers, {reductions} reductions"


def _budget(schedule: Schedule) -> str:
    return f"; budget {size(schedule.budget)}" if schedule.budget is not None else ""


def _timeline(schedule: Schedule, simulation: Simulation | None) -> dict[str, Any]:
    if simulation is not None:
        drawn = [(span.index, span.stream, span.start, span.stop) for span in simulation.spans]
        memory = list(_with_and_without_activations(schedule, simulation))
    else:
        drawn = list(_by_position(schedule))
        memory = [(float(i), held, held) for i, held in _held_by_position(schedule)]
    streams = stream_order(stream for _, stream, _, _ in drawn)
    ends = [stop for _, _, _, stop in drawn]
    return {
        "streams": streams,
        "spans": [(event, streams.index(stream), start, stop) for event, stream, start, stop in drawn],
        "memory": memory,
        "end": max(ends, default=0),
        "step": simulation.step_seconds if simulation is not None else len(schedule.events),
    }


def _with_and_without_activations(schedule: Schedule, simulation: Simulation) -> Iterator[tuple[float, int, int]]:
    """(seconds, bytes held, bytes held in shards and arena): a budget bounds the latter."""
    ends = sorted((span.stop, span.index) for span in simulation.spans)
    computed = [(stop, schedule.events[i]) for stop, i in ends if schedule.events[i].kind in COMPUTES]
    activations, k = 0, 0
    for seconds, held in simulation.memory:
        while k < len(computed) and computed[k][0] <= seconds:
            activations = computed[k][1].held
            k += 1
        yield seconds, held, max(held - activations, schedule.resident_bytes)


def _by_position(schedule: Schedule) -> Iterator[Drawn]:
    """Each event at its position; a gather reaches to its wait and a reduction to its finish, one at a time."""
    over: dict[int, int] = {}
    started: dict[tuple[str, Kind], int] = {}
    ends = {Kind.WAIT: Kind.UNSHARD, Kind.FINISH: Kind.REDUCE}
    for i, event in enumerate(schedule.events):
        started[event.bucket, event.kind] = i
        if event.kind in ends:
            start = started.pop((event.bucket, ends[event.kind]), None)
            if start is not None:
                over[start] = i
    free: dict[str, float] = {}
    for i, event in enumerate(schedule.events):
        if event.kind in (Kind.COMPUTE, Kind.UPDATE):
            yield i, event.stream, i, i + 1
        elif event.kind in COMMUNICATES:
            start_at = max(float(i), free.get(event.stream, 0.0))
            stop = max(float(over.get(i, i + 1)), start_at)
            free[event.stream] = stop
            yield i, event.stream, start_at, stop
        else:
            yield i, event.stream, i, i


def _held_by_position(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Bytes held after each event that takes or gives back a place in the arena."""
    held, taken = schedule.resident_bytes, dict[tuple[Kind, int], int]()
    gives_back = {Kind.RESHARD: Kind.UNSHARD, Kind.FINISH: Kind.GRAD}
    yield 0, held
    for i, event in enumerate(schedule.events):
        if event.kind in (Kind.UNSHARD, Kind.GRAD) and event.slot is not None:
            taken[event.kind, event.bucket_index] = event.slot.bytes
            held += event.slot.bytes
            yield i, held
        elif event.kind in gives_back:
            held -= taken.pop((gives_back[event.kind], event.bucket_index), 0)
            yield i, held


def _events(events: tuple[Event, ...]) -> dict[str, Any]:
    """Events as arrays that refer to a table of strings: a page of thousands of them stays small."""
    strings: dict[str, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    rows = [
        [
            text(event.kind.value),
            text(event.phase.value),
            event.bucket_index,
            event.bytes,
            text(_dtype(event.dtype)),
            text(event.group),
            [event.slot.offset, event.slot.bytes] if event.slot is not None else 0,
            event.flops,
            event.traffic,
            event.held,
            event.waits_for,
            event.reads,
            event.writes,
            text(event.why),
        ]
        for event in events
    ]
    return {"events": rows, "strings": list(strings)}


def _bucket(bucket: BucketPlan) -> dict[str, Any]:
    layout = bucket.layout
    dtypes = (bucket.param_dtype, bucket.reduce_dtype, bucket.master_dtype)
    return {
        "name": bucket.name,
        "params": [(slot.spec.name, slot.spec.shape) for slot in layout.slots],
        "elements": layout.numel - layout.padding,
        "gathered": bucket.gathered_bytes,
        "grad": bucket.grad_bytes,
        "shard": layout.shard_numel * bucket.master_dtype.itemsize,
        "padding": layout.padding / layout.numel if layout.numel else 0,
        "dtypes": " / ".join(map(_dtype, dtypes)),
        "layout": f"{'whole' if layout.whole else 'rows'} over {layout.ranks}" if layout.ranks > 1 else "replicated",
    }


def _by_first_use(schedule: Schedule) -> list[int]:
    used = dict.fromkeys(event.bucket_index for event in schedule.events if event.bucket_index >= 0)
    return [*used, *(bucket.index for bucket in schedule.buckets if bucket.index not in used)]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs"
