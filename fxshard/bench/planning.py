"""The cost of planning, and its gain in the simulator: the tables of docs/planning-figures.md.

fxshard bench planning                              # all parts, which takes an hour
fxshard bench planning --parts layers --layers 2,4 --svg cost.svg
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench.captured import Captured, capture
from fxshard.bench.harness import Column, Row, Table, in_fresh_process, numbers, parser_of, write
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.bench.presets import PRESETS
from fxshard.planner.hardware import hardware as known
from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.simulate import Simulation

LAYERS = (8, 16, 32, 64, 80)
RANKS = (8, 64, 1024)
HARDWARE = ("h100", "h200", "gb200")
PRECISION = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)


RULES: dict[str, dict[str, Any]] = {
    "default": {"optimizer": fxshard.AdamW()},
    "roomy": {"optimizer": fxshard.AdamW(), "roomy": True},
    "one ahead": {"optimizer": fxshard.AdamW(), "debug": fxshard.Debug(prefetch=1, defer_wgrad=False)},
    "FSDP2": {"fsdp2": True},
}
"""The rules that are compared. *roomy* may use the share ``ROOM`` of the device's memory for shards and arena. FSDP2
starts a step with nothing gathered."""

OURS = ("default", "roomy")
ROOM = 0.7


def one(layers: int) -> dict[str, float]:
    """Plan here, and say what it took. Importing torch is part of the memory and not of the time."""
    import resource

    model, inputs = PRESETS["llama-70b"](layers)
    started, busy = time.perf_counter(), time.process_time()
    schedule = fxshard.plan(model, inputs, world_size=1024, hardware="h200", precision=PRECISION)
    seconds, cpu = time.perf_counter() - started, time.process_time() - busy
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return {"seconds": seconds, "cpu": cpu, "gib": gib, "events": len(schedule)}


def gain_rows(preset: str) -> Iterator[Row]:
    """A simulated step by each rule, on each machine and number of ranks; one model is captured once for machines with
    the same kernels."""
    captured: dict[tuple[int, int] | None, Captured] = {}
    for ranks in RANKS:
        for hardware in HARDWARE:
            kernels = known(hardware).capability
            if kernels not in captured:
                captured[kernels] = capture(*PRESETS[preset](), precision=PRECISION, hardware=hardware)
            found = {rule: _step(captured[kernels], ranks, hardware, **options) for rule, options in RULES.items()}
            least = min(step["exposed"] for rule, step in found.items() if step and rule not in OURS)
            if any(found[rule] and found[rule]["exposed"] > least * (1 + 1e-9) for rule in OURS):
                raise AssertionError(f"{preset}, {hardware}, {ranks} ranks: worse than one ahead: {found}")
            figures = {f"{rule}: {key}": value for rule, step in found.items() for key, value in step.items()}
            yield {"name": f"{hardware}, {ranks} ranks", **figures}


def _step(captured: Captured, ranks: int, hardware: str, *, roomy: bool = False, **options: Any) -> dict[str, float]:
    """Figures of a simulated step, in milliseconds; none where it does not fit.

    *seam*: compute stands still between two steps, for the last reductions and the first gathers. *turn*: the network
    rests before the first reduction.
    """
    if roomy:
        options["memory_budget"] = int(known(hardware).memory_bytes * ROOM)
    try:
        schedule = captured.schedule(ranks=ranks, hardware=hardware, **options)
    except fxshard.BudgetError:
        return {}
    schedule.verify()
    run = schedule.simulate(hardware)
    seconds = {
        "compute": run.compute_seconds,
        "communication": run.communication_seconds,
        "step": run.step_seconds,
        "exposed": run.exposed_seconds,
        "seam": _seam(schedule, run),
        "turn": _turn(schedule, run),
    }
    ratios = {"step / bound": run.step_seconds / run.bound_seconds, "arena GiB": schedule.arena_bytes / 2**30}
    return {**{name: 1e3 * value for name, value in seconds.items()}, **ratios}


def _seam(schedule: Schedule, run: Simulation) -> float:
    spans = list(zip(schedule.events, run.spans, strict=True))
    computed = [span for event, span in spans if event.kind is Kind.COMPUTE and event.phase is Phase.BACKWARD]
    updated = min(span.start for event, span in spans if event.kind is Kind.UPDATE)
    waited = [event.bucket_index for event, _ in spans if event.kind is Kind.WAIT]
    first = waited[:2]  # the embedding and the first layer
    stood = [
        span.stop - span.start
        for event, span in spans
        if event.kind is Kind.WAIT and event.phase is Phase.FORWARD and event.bucket_index in first
    ]
    return sum(stood) + max(0.0, updated - computed[-1].stop)


def _turn(schedule: Schedule, run: Simulation) -> float:
    spans = list(zip(schedule.events, run.spans, strict=True))
    reduced = min(span.start for event, span in spans if event.kind is Kind.REDUCE)
    ends = [
        span.stop - (run.step_seconds if event.phase is Phase.OPTIMIZER else 0.0)  # those began in the step before
        for event, span in spans
        if event.kind is Kind.UNSHARD
    ]
    return reduced - max((end for end in ends if end <= reduced), default=0.0)


def layers_table(depths: Sequence[int]) -> Iterator[Table]:
    columns = (
        Column("seconds", "seconds", bars="planning", unit="s"),
        Column("cpu", "CPU seconds"),
        Column("gib", "peak GiB", ".2f"),
        Column("events", "events", ".0f"),
    )
    yield _table("Cost by layers: llama-70b on 1024 ranks", columns, map(_cost_row, depths), len(depths))


def _cost_row(layers: int) -> Row:
    """The row of one plan, made in a process of its own."""
    found = in_fresh_process("-m", "fxshard.bench.planning", "--one", str(layers))
    return {"name": f"{layers} layers", **found}


def gain_tables() -> Iterator[Table]:
    of_ours = ("communication", "step", "exposed", "step / bound", "seam", "turn", "arena GiB")
    titles = ["default: compute"]
    for rule in RULES:
        titles += [f"{rule}: {figure}" for figure in (of_ours if rule in OURS else ("step", "exposed"))]
    columns = tuple(Column(title, title, ".3f" if "bound" in title else ".1f") for title in titles)
    for preset in PRESETS:
        title = f"Gain: {preset}, milliseconds per step"
        yield _table(title, columns, gain_rows(preset), len(RANKS) * len(HARDWARE))


def muon_table() -> Iterator[Table]:
    """A training step with each optimizer, and what its optimizer phase has to do, in milliseconds."""
    titles = ("step", "to AdamW", "compute", "communication", "exposed", "updates", "tail")
    columns = tuple(Column(title, title, ".3f" if title == "to AdamW" else ".1f") for title in titles)
    yield _table("Muon against AdamW: 0.95 B Llama, 4 × 4096 tokens per rank, h200", columns, _muon_rows(), 8)


def _muon_rows() -> Iterator[Row]:
    with torch.device("meta"):
        model = Llama(LlamaConfig())
        tokens = torch.empty(4, 4096, dtype=torch.long)
    captured = capture(model, (tokens, tokens), precision=PRECISION)
    for ranks in (8, 64):
        for zero in (3, 1):
            baseline = 0.0
            for name, optimizer in (("AdamW", fxshard.AdamW()), ("Muon", fxshard.Muon())):
                schedule = captured.schedule(ranks=ranks, hardware="h200", zero=zero, optimizer=optimizer)
                run = schedule.simulate("h200")
                baseline = baseline or run.step_seconds
                figures = {key: 1e3 * seconds for key, seconds in _muon_seconds(schedule, run).items()}
                ratio = run.step_seconds / baseline
                yield {"name": f"{ranks} ranks, ZeRO-{zero}, {name}", **figures, "to AdamW": ratio}


def _muon_seconds(schedule: Schedule, run: Simulation) -> dict[str, float]:
    """*updates*: compute of the optimizer phase. *tail*: from the end of the last stretch of backward to the step's."""
    spans = list(zip(schedule.events, run.spans, strict=True))
    updates = sum(
        span.stop - span.start
        for event, span in spans
        if event.phase is Phase.OPTIMIZER and event.kind in (Kind.UPDATE, Kind.COMPUTE)
    )
    backward = max(span.stop for event, span in spans if event.phase is Phase.BACKWARD and event.kind is Kind.COMPUTE)
    return {
        "step": run.step_seconds,
        "compute": run.compute_seconds,
        "communication": run.communication_seconds,
        "exposed": run.exposed_seconds,
        "updates": updates,
        "tail": run.step_seconds - backward,
    }


def _table(title: str, columns: tuple[Column, ...], rows: Iterator[Row], total: int) -> Table:
    """Print a table in Markdown, row by row as they come."""
    made = Table(title, columns, [])
    print(f"\n### {title}\n\n| {' | '.join(made.head)} |\n|{'---|' * len(made.head)}", flush=True)
    found: list[Row] = []
    with progress(total) as begin:
        for number in range(total):
            begin(f"row {number + 1} of {total}")
            found.append(next(rows))
            print(f"| {' | '.join(made.cells(found[-1]))} |", flush=True)
    return Table(title, columns, found)


PARTS = ("layers", "gains", "muon")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all of them)")
    parser.add_argument(
        "--layers", type=numbers, default=LAYERS, metavar="N,...", help="depths in the part of that name"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(one(args.one)))
        return
    parts: dict[str, Callable[[], Iterator[Table]]] = {
        "layers": lambda: layers_table(args.layers),
        "gains": gain_tables,
        "muon": muon_table,
    }
    tables = [table for part in args.parts for table in parts[part]()]
    write(args.json, tables)


if __name__ == "__main__":
    main()
