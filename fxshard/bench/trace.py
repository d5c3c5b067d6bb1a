"""Read a profiler's trace of a training step: where the device's time goes, and where the host waits for it.

Works on the events of a Chrome trace as ``torch.profiler`` writes it; no torch is needed to read one.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fxshard.bench.harness import Column, Row, Table

Event = dict[str, Any]
Span = tuple[float, float]

STEP = "fxshard bench step"
"""The annotation around each step."""

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
AROUND = ("cpu_op", "user_annotation", "python_function")
WAITING = re.compile(r"(cuda|cu)(Stream|Device|Ctx|Event)Synchronize|cudaMemcpy(2D|ToSymbol|FromSymbol)?|cudaFree")
"""Calls that come back when the device has got there. ``cudaMemcpyAsync`` is one where host memory is pageable."""

CASTING = ("LoadWithCast", "StoreWithCast", "bfloat16_copy_kernel", "float16_copy_kernel", "float8_copy_kernel")
COPYING = re.compile(r"copy|CatArray|chunk_cat", re.IGNORECASE)
FILLING = re.compile(r"FillFunctor|fill_kernel", re.IGNORECASE)
GENERATED = re.compile(r"triton_[a-z]+_fused_(?P<ops>\w+?)_\d+$")
MOVES = re.compile(r"(_?(to_copy|copy|clone|view|reshape|transpose|permute|unsqueeze|squeeze|expand|slice|t|cat)_?)+")
"""A kernel of Inductor's is a copy if its name lists nothing else."""


@dataclass(frozen=True)
class Wait:
    """Calls within the steps at which the host waits for the device."""

    call: str
    inside: str
    """The outermost and the innermost operator or annotation around it."""
    count: int
    host_ms: float


@dataclass(frozen=True)
class Moved:
    """Kernels and copies of a step that compute nothing."""

    count: float
    ms: float


@dataclass(frozen=True)
class Traced:
    """One step of a trace, the mean of its steps. Times are of the device unless they say otherwise."""

    steps: int
    window_ms: float
    """From the first to the last kernel or copy."""
    busy_ms: float
    compute_ms: float
    """With a kernel running that is not NCCL's."""
    communication_ms: float
    """With a kernel of NCCL's running."""
    hidden: float | None
    """The share of that during which something is computed; None without communication."""
    idle_ms: float
    longest_gap_ms: float
    kernels: float
    moved: dict[str, Moved]
    """By kind: copy, cast, fill."""
    waits: tuple[Wait, ...]


def read(path: Path) -> list[Event]:
    """The events of a trace file, packed or not."""
    data = path.read_bytes()
    events: list[Event] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return events


def analyse(events: Iterable[Event]) -> Traced | None:
    """Analyse the annotated steps; None if nothing ran on a device. A trace is expected to end with its last step."""
    complete = [event for event in events if event.get("ph") == "X"]
    steps = sorted(span(e) for e in complete if e.get("cat") == "user_annotation" and e["name"] == STEP)
    if not steps:
        raise ValueError(f"no annotation {STEP!r} in the trace")
    ran = [e for e in complete if e.get("cat") in DEVICE and e["ts"] >= steps[0][0]]
    if not ran:
        return None
    kernels = [e for e in ran if e["cat"] == "kernel"]
    communication = union(span(e) for e in kernels if is_communication(e["name"]))
    compute = union(span(e) for e in kernels if not is_communication(e["name"]))
    busy = union(span(e) for e in ran)
    gaps = [after[0] - before[1] for before, after in pairwise(busy)]
    each = 1e3 * len(steps)  # of microseconds of all steps, the milliseconds of one
    return Traced(
        steps=len(steps),
        window_ms=(busy[-1][1] - busy[0][0]) / each,
        busy_ms=length(busy) / each,
        compute_ms=length(compute) / each,
        communication_ms=length(communication) / each,
        hidden=length(overlap(communication, compute)) / length(communication) if communication else None,
        idle_ms=sum(gaps) / each,
        longest_gap_ms=max(gaps, default=0.0) / 1e3,
        kernels=len(kernels) / len(steps),
        moved=_moved(ran, len(steps)),
        waits=_waits(complete, steps),
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def overlap(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """The time that is in both, each as :func:`union` gives it."""
    found: list[Span] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def is_communication(name: str) -> bool:
    return name.startswith("nccl")


def kind_of_move(event: Event) -> str | None:
    """copy, cast or fill; None for what computes."""
    name: str = event["name"]
    if event["cat"] == "gpu_memset" or FILLING.search(name):
        return "fill"
    if event["cat"] == "gpu_memcpy":
        return "copy"
    if "cutlass" in name:
        return None  # a product, whatever its template arguments are called
    generated = GENERATED.match(name)
    if generated:
        only_moves = MOVES.fullmatch(generated["ops"])
        return ("cast" if "_to_copy" in generated["ops"] else "copy") if only_moves else None
    if any(word in name for word in CASTING):
        return "cast" if "copy" in name else None
    return "copy" if COPYING.search(name) and not is_communication(name) else None


def span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _moved(ran: Iterable[Event], steps: int) -> dict[str, Moved]:
    count: Counter[str] = Counter()
    time: Counter[str] = Counter()
    for event in ran:
        kind = kind_of_move(event)
        if kind is not None:
            count[kind] += 1
            time[kind] += event["dur"]
    return {kind: Moved(count[kind] / steps, time[kind] / 1e3 / steps) for kind in ("copy", "cast", "fill")}


def _waits(complete: Sequence[Event], steps: Sequence[Span]) -> tuple[Wait, ...]:
    """Of all threads: backward has one of its own."""
    pageable = {
        e["args"].get("correlation") for e in complete if e.get("cat") == "gpu_memcpy" and "Pageable" in e["name"]
    }
    around = [e for e in complete if e.get("cat") in AROUND and e["name"] != STEP]
    count: Counter[tuple[str, str]] = Counter()
    time: Counter[tuple[str, str]] = Counter()
    for call in complete:
        if call.get("cat") not in CALLS or not any(begin <= call["ts"] < end for begin, end in steps):
            continue
        name = call["name"]
        if name.startswith("cudaMemcpyAsync") and call["args"].get("correlation") in pageable:
            name += ", pageable"
        elif not WAITING.fullmatch(name):
            continue
        key = name, _inside(call, around)
        count[key] += 1
        time[key] += call["dur"]
    return tuple(Wait(name, inside, count[name, inside], time[name, inside] / 1e3) for name, inside in sorted(count))


def _inside(call: Event, around: Iterable[Event]) -> str:
    """The outermost and the innermost of what is around a call on its thread."""
    begin, end = span(call)
    found = sorted(
        (e["dur"], e["name"])
        for e in around
        if (e["pid"], e["tid"]) == (call["pid"], call["tid"])
        and e["ts"] <= begin
        and e["ts"] + e["dur"] >= end
        and not e["name"].startswith("ProfilerStep")
    )
    if not found:
        return "no operator"
    innermost, outermost = found[0][1], found[-1][1]
    return innermost if innermost == outermost else f"{outermost} > {innermost}"


COLUMNS = (
    Column("window_ms", "window", ".2f"),
    Column("busy_ms", "busy", ".2f"),
    Column("compute_ms", "compute", ".2f"),
    Column("communication_ms", "comm.", ".2f"),
    Column("hidden", "hidden", ".1%"),
    Column("exposed_ms", "exposed", ".2f", bars="communication with no compute at the same time", unit="ms"),
    Column("idle_ms", "idle", ".2f", bars="nothing running on the device, within a step", unit="ms"),
    Column("longest_gap_ms", "longest gap", ".3f"),
    *(Column(key, key, ".0f") for key in ("kernels", "copies", "casts", "fills", "waits")),
)


def table(model: str, found: dict[str, Traced | None]) -> Table:
    """By contender. Milliseconds of the device in a step, and numbers of things in it; where nothing ran on a GPU,
    there is nothing to say."""
    rows: list[Row] = []
    for name, traced in found.items():
        rows.append({"name": name})
        if traced is not None:
            moved = {f"{kind[:-1]}ies" if kind == "copy" else f"{kind}s": m.count for kind, m in traced.moved.items()}
            exposed = traced.communication_ms * (1 - (traced.hidden or 0))
            waits = sum(wait.count for wait in traced.waits) / traced.steps
            rows[-1] |= {**asdict(traced), **moved, "exposed_ms": exposed, "waits": waits}
    return Table(f"{model}, device ms of a step", COLUMNS, rows)


def waits(found: dict[str, Traced | None]) -> list[str]:
    """A line for each call at which the host waits for the device."""
    return [
        f"{name} waits: {wait.count} × {wait.call} ({wait.host_ms:.2f} ms) in {wait.inside}"
        for name, traced in found.items()
        if traced is not None
        for wait in traced.waits
    ]
