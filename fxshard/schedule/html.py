"""A schedule as one self-contained HTML page: timeline, memory and buckets, nothing loaded from the network."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.schedule.events import Event, Kind
from fxshard.schedule.schedule import Schedule, size
from fxshard.schedule.trace import stream_order

if TYPE_CHECKING:
    from fxshard.planner.hardware import Hardware
    from fxshard.schedule.simulate import Simulation

COMPUTES = (Kind.COMPUTE, Kind.UPDATE)


def to_html(schedule: Schedule, simulation: Simulation, machine: Hardware | None = None, about: str = "") -> str:
    """The page of a step that was simulated on ``machine``. ``about``: what is trained, the model and its inputs.

    >>> Path("schedule.html").write_text(to_html(schedule, simulate(schedule, hardware("h200")), hardware("h200")))
    """
    template = resources.files("fxshard.schedule").joinpath("page.html").read_text(encoding="utf-8")
    ranks = f"{schedule.ranks} rank" + "s" * (schedule.ranks != 1) + schedule.replicated
    data = {
        "title": f"ZeRO-{schedule.zero} on {ranks}",
        "about": " · ".join(filter(None, [about, _described(machine)])),
        "subtitle": f"{len(schedule.buckets)} buckets · {len(schedule.events)} events · digest {schedule.digest}",
        "figures": list(_figures(schedule, simulation)),
        "budget": schedule.budget,
        "capacity": machine.memory_bytes if machine is not None else None,
        "resident": schedule.resident_bytes,
        "peak": simulation.peak_bytes,
        **_timeline(schedule, simulation),
        **_events(schedule.events),
        "buckets": [_bucket(bucket) for bucket in schedule.buckets],
        "order": _by_first_use(schedule),
    }
    title = html.escape(" · ".join(filter(None, [about, data["title"], "fxshard schedule"])))
    return template.replace("$TITLE", title, 1).replace("$DATA", embedded(data), 1)


def _described(machine: Hardware | None) -> str:
    return "" if machine is None else f"simulated on {machine.name}, {size(machine.memory_bytes)} a device"


def embedded(data: Any) -> str:
    """JSON that may stand in a ``<script>``: no character in it can end the element or begin another."""
    text = json.dumps(data, separators=(",", ":"))  # ASCII, so line separators are escaped already
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _figures(schedule: Schedule, simulation: Simulation) -> Iterator[tuple[str, str, str]]:
    """(name, value, note) of the boxes on top."""
    step, exposed, bound = simulation.step_seconds, simulation.exposed_seconds, simulation.bound_seconds
    slower = f"{step / bound - 1:.1%} above the bound of {duration(bound)}" if bound else ""
    yield "step time, simulated", duration(step), slower
    yield "exposed communication", duration(exposed), f"{exposed / step:.1%} of the step" if step else ""
    busy = f"{simulation.compute_seconds / step:.1%} of the step" if step else ""
    yield "compute", duration(simulation.compute_seconds), busy
    hidden = f"{simulation.overlap:.1%} hidden by compute" if simulation.communication_seconds else ""
    yield "communication", duration(simulation.communication_seconds), hidden
    yield "peak memory, simulated", size(simulation.peak_bytes), "with activations"
    held = f"{size(schedule.resident_bytes)} at rest + {size(schedule.arena_bytes)} arena"
    held += f" + {size(schedule.activation_bytes + schedule.workspace_bytes)} activations"
    held += f"; {size(schedule.host_bytes)} on the host" if schedule.host_bytes else ""
    held += f"; budget {size(schedule.budget)}" if schedule.budget is not None else ""
    yield "allocated at most", size(schedule.peak_bytes), held
    gathers = sum(1 for _ in schedule.of(Kind.UNSHARD))
    reductions = sum(1 for _ in schedule.of(Kind.REDUCE))
    own = sum(1 for _ in schedule.of(Kind.COLLECTIVE))
    counted = f"{gathers} gathers, {reductions} reductions" + f", {own} of the model's own" * bool(own)
    yield "communication per step", size(schedule.comm_bytes), counted


def _timeline(schedule: Schedule, simulation: Simulation) -> dict[str, Any]:
    streams = stream_order(span.stream for span in simulation.spans)
    return {
        "streams": streams,
        "spans": [(span.index, streams.index(span.stream), span.start, span.stop) for span in simulation.spans],
        "memory": list(_with_and_without_activations(schedule, simulation)),
        "end": max((span.stop for span in simulation.spans), default=0),
        "step": simulation.step_seconds,
    }


def _with_and_without_activations(schedule: Schedule, simulation: Simulation) -> Iterator[tuple[float, int, int]]:
    """(seconds, bytes held, bytes held in shards and arena)."""
    ends = sorted((span.stop, span.index) for span in simulation.spans)
    computed = [(stop, schedule.events[i]) for stop, i in ends if schedule.events[i].kind in COMPUTES]
    activations, k = 0, 0
    for seconds, held in simulation.memory:
        while k < len(computed) and computed[k][0] <= seconds:
            activations = computed[k][1].held
            k += 1
        yield seconds, held, max(held - activations, schedule.resident_bytes)


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
