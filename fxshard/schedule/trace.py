"""A simulated step as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fxshard.schedule.events import OF_HOST, Event, Kind
from fxshard.schedule.schedule import Schedule, size

if TYPE_CHECKING:
    from fxshard.schedule.simulate import Simulation, Span

STREAMS = ("compute", "gather", "reduce", "replicas", "tensor", "host")
"""Tracks from top to bottom; a stream that is not listed comes below."""


def to_chrome_trace(schedule: Schedule, simulation: Simulation) -> str:
    """One track per stream, an arrow where one stream waits for another, and memory as a counter. Times in µs.

    >>> Path("step.json").write_text(to_chrome_trace(schedule, simulate(schedule, hardware("h200"))))
    """
    tracks = stream_order(span.stream for span in simulation.spans)
    events: list[dict[str, Any]] = [
        _named("process_name", 0, f"ZeRO-{schedule.zero}, one of {schedule.ranks} ranks (simulated)")
    ]
    for tid, stream in enumerate(tracks):
        events.append(_named("thread_name", tid, stream))
        events.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    drawn: dict[int, Span] = {}
    for span in simulation.spans:
        event, tid = schedule.events[span.index], tracks.index(span.stream)
        drawn.setdefault(span.index, span)
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": tid,
                "ts": _micros(span.start),
                "dur": _micros(span.stop) - _micros(span.start),
                "name": title(schedule, event),
                "cat": f"{event.phase.value},{event.kind.value}",
                "args": details(schedule, span.index),
            }
        )
    arrows = 0
    for span in simulation.spans:
        for cause in schedule.events[span.index].waits_for:
            before = drawn.get(cause)
            if before is None or before.stream == span.stream:
                continue
            arrows += 1  # Perfetto takes numbers only
            arrow = {"pid": 0, "cat": "waits", "name": "waits for", "id": arrows}
            events.append({**arrow, "ph": "s", "tid": tracks.index(before.stream), "ts": _micros(before.start)})
            events.append({**arrow, "ph": "f", "bp": "e", "tid": tracks.index(span.stream), "ts": _micros(span.start)})
    for seconds, held in simulation.memory:
        events.append({"ph": "C", "pid": 0, "name": "memory", "ts": _micros(seconds), "args": {"bytes": held}})
    about = {"digest": schedule.digest, "zero": schedule.zero, "ranks": schedule.ranks, "peak": schedule.peak_bytes}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _micros(seconds: float) -> float:
    """Eighths of a microsecond: a binary fraction and a whole number of nanoseconds, so that slices which touch still
    do when a viewer has turned them into nanoseconds. Perfetto drops slices that overlap by one."""
    return round(seconds * 8e6) / 8


def stream_order(streams: Iterable[str]) -> list[str]:
    """Each stream once, the usual ones first."""
    found = dict.fromkeys(streams)
    return [stream for stream in STREAMS if stream in found] + [stream for stream in found if stream not in STREAMS]


def title(schedule: Schedule, event: Event) -> str:
    """The title of an event: its kind and bucket, or for one without a bucket those it works on."""
    if event.kind in OF_HOST:
        return f"{event.kind.value} {event.op}"
    if event.op:
        return f"{event.op} in {event.group}" if event.kind is Kind.COLLECTIVE else f"await {event.op}"
    what = event.phase.value if event.kind is Kind.COMPUTE else event.kind.value
    return f"{what} {event.bucket or schedule.touched(event) or event.why}"


def details(schedule: Schedule, position: int) -> dict[str, Any]:
    """The details of an event that is clicked on."""
    event = schedule.events[position]
    shown: dict[str, Any] = {"event": position, "phase": event.phase.value, "kind": event.kind.value, "why": event.why}
    if event.kind is Kind.COMPUTE:
        shown |= {"flop": event.flops, "traffic": size(event.traffic), "activations": size(event.held)}
    else:
        shown |= {
            "bucket": event.bucket,
            "bytes": event.bytes,
            "size": size(event.bytes),
            "dtype": str(event.dtype).removeprefix("torch."),
            "group": event.group,
        }
    if event.slot is not None:
        where = "on the host" if event.kind in OF_HOST else "slot"
        shown[where] = f"{event.slot.offset} … {event.slot.end}"
    if event.waits_for:
        shown["waits for"] = ", ".join(f"#{i}" for i in event.waits_for)
    return shown


def _named(what: str, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": tid, "name": what, "args": {"name": name}}
