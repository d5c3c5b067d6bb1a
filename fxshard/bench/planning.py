"""What planning costs, and what it gains: the tables of docs/planning-figures.md.

fxshard bench planning                              # all parts, which takes an hour
fxshard bench planning --quick                      # fewer layers
fxshard bench planning --parts layers --layers 2,4 --svg cost.svg
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench.arguments import in_fresh_process, parser_of
from fxshard.bench.captured import Captured, capture
from fxshard.bench.figures import Column, Row, Table, write
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.bench.presets import PRESETS
from fxshard.plan.hardware import hardware as known
from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.simulate import Simulation

LAYERS = (8, 16, 32, 64, 80)
QUICK_LAYERS = 16
QUICK_DEPTHS = (8, 16)
RANKS = (8, 64, 1024)
HARDWARE = ("h100", "h200", "gb200")
PRECISION = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)


RULES: dict[str, dict[str, Any]] = {
    "default": {"optimizer": fxshard.AdamW()},
    "roomy": {"optimizer": fxshard.AdamW(), "roomy": True},
    "one ahead": {"optimizer": fxshard.AdamW(), "debug": fxshard.Debug(prefetch=1, defer_wgrad=False)},
    "FSDP2": {"fsdp2": True},
}
"""What is compared. *roomy* may use the share ``ROOM`` of the device's memory for shards and arena. FSDP2 starts a step
with nothing gathered."""

OURS = ("default", "roomy")
ROOM = 0.7


def one(preset: str, layers: int, ranks: int) -> dict[str, float]:
    """Plan here, and say what it took. Importing torch is part of the memory and not of the time."""
    import resource

    model, inputs = PRESETS[preset](layers or None)
    started, busy = time.perf_counter(), time.process_time()
    schedule = fxshard.plan(model, inputs, world_size=ranks, hardware="h200", precision=PRECISION)
    seconds, cpu = time.perf_counter() - started, time.process_time() - busy
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return {"seconds": seconds, "cpu": cpu, "gib": gib, "events": len(schedule)}


def gains(preset: str, layers: int | None) -> Iterator[tuple[str, int, dict[str, Step | None]]]:
    """(hardware, ranks, {rule: simulated step, None where it does not fit}) of one model, captured once for machines
    with the same kernels."""
    captured: dict[tuple[int, int] | None, Captured] = {}
    for ranks in RANKS:
        for hardware in HARDWARE:
            kernels = known(hardware).capability
            if kernels not in captured:
                captured[kernels] = capture(*PRESETS[preset](layers), precision=PRECISION, hardware=hardware)
            found = {rule: _step(captured[kernels], ranks, hardware, **options) for rule, options in RULES.items()}
            for ours in filter(None, (found[rule] for rule in OURS)):
                for other in filter(None, (found["one ahead"], found["FSDP2"])):
                    if ours.exposed > other.exposed * (1 + 1e-9):
                        raise AssertionError(f"{preset}, {hardware}, {ranks} ranks: worse than one ahead: {found}")
            yield hardware, ranks, found


@dataclass(frozen=True)
class Step:
    """What the table says of a simulated step: seconds and bytes."""

    seconds: float
    exposed: float
    compute: float
    communication: float
    bound: float
    seam: float
    """Compute stands still between two steps: for the last reductions and the first gathers."""
    turn: float
    """The network rests before the first reduction."""
    arena: int


def _step(captured: Captured, ranks: int, hardware: str, *, roomy: bool = False, **options: Any) -> Step | None:
    if roomy:
        options["memory_budget"] = int(known(hardware).memory_bytes * ROOM)
    try:
        schedule = captured.schedule(ranks=ranks, hardware=hardware, **options)
    except fxshard.BudgetError:
        return None
    schedule.verify()
    run = schedule.simulate(hardware)
    return Step(
        run.step_seconds,
        run.exposed_seconds,
        run.compute_seconds,
        run.communication_seconds,
        run.bound_seconds,
        _seam(schedule, run),
        _turn(schedule, run),
        schedule.arena_bytes,
    )


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
    """Of one plan, in a process of its own."""
    found = in_fresh_process("-m", "fxshard.bench.planning", "--one", "llama-70b", str(layers), "1024")
    return {"name": f"{layers} layers", **found}


def gain_tables(layers: int | None) -> Iterator[Table]:
    for preset in PRESETS:
        about = f", {layers} layers" if layers else ""
        head = ["compute"]
        for rule in OURS:
            head += [f"{rule}: communication", "step (exposed)", "step / bound", "seam", "turn", "arena GiB"]
        head += [f"{rule}: step (exposed)" for rule in RULES if rule not in OURS]
        rows = (_gain_row(*row) for row in gains(preset, layers))
        title = f"Gain: {preset}{about}, milliseconds per step"
        yield _table(title, _texts(head), map(_named, rows), len(RANKS) * len(HARDWARE))


def _gain_row(hardware: str, ranks: int, found: dict[str, Step | None]) -> list[str]:
    default = found["default"]
    assert default is not None
    row = [f"{hardware}, {ranks} ranks", f"{default.compute * 1e3:.1f}"]
    for rule in OURS:
        step = found[rule]
        if step is None:
            row += ["–"] * 6
        else:
            ratio, gib = f"{step.seconds / step.bound:.3f}", f"{step.arena / 2**30:.1f}"
            row += [f"{step.communication * 1e3:.1f}", _taken(step), ratio]
            row += [f"{step.seam * 1e3:.1f}", f"{step.turn * 1e3:.1f}", gib]
    return [*row, *[_taken(step) for rule, step in found.items() if rule not in OURS and step is not None]]


def _taken(step: Step) -> str:
    return f"{step.seconds * 1e3:.1f} ({step.exposed * 1e3:.1f})"


def muon_table() -> Iterator[Table]:
    """A training step with each optimizer, and what its optimizer phase has to do."""
    head = ("step", "to AdamW", "compute", "communication", "exposed", "updates", "tail")
    title = "Muon against AdamW, simulated: 0.95 B Llama, 4 × 4096 tokens per rank, h200"
    yield _table(title, _texts(head), map(_named, _muon_rows()), 8)


def _muon_rows() -> Iterator[list[str]]:
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
                yield [f"{ranks} ranks, ZeRO-{zero}, {name}", *_muon_figures(schedule, run, baseline)]


def _muon_figures(schedule: Schedule, run: Simulation, baseline: float) -> list[str]:
    """*updates*: compute of the optimizer phase. *tail*: from the end of the last stretch of backward to the step's."""
    spans = [(event, span) for event, span in zip(schedule.events, run.spans, strict=True)]
    updates = sum(
        span.stop - span.start
        for event, span in spans
        if event.phase is Phase.OPTIMIZER and event.kind in (Kind.UPDATE, Kind.COMPUTE)
    )
    backward = max(span.stop for event, span in spans if event.phase is Phase.BACKWARD and event.kind is Kind.COMPUTE)
    tail = run.step_seconds - backward
    times = (run.compute_seconds, run.communication_seconds, run.exposed_seconds, updates, tail)
    return [
        f"{run.step_seconds * 1e3:.1f}",
        f"{run.step_seconds / baseline:.3f}",
        *[f"{seconds * 1e3:.1f}" for seconds in times],
    ]


def _texts(titles: Sequence[str]) -> tuple[Column, ...]:
    return tuple(Column(str(i), title) for i, title in enumerate(titles))


def _named(cells: list[str]) -> Row:
    """A row of texts, whose first is its name."""
    return {"name": cells[0], **{str(i): cell for i, cell in enumerate(cells[1:])}}


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
    parser.add_argument("--layers", metavar="N,...", help="depths in the part of that name (default: 8 to 80)")
    parser.add_argument(
        "--quick", action="store_true", help=f"depths of 8 and 16; gains with {QUICK_LAYERS} layers of each model"
    )
    parser.add_argument("--one", nargs=3, metavar=("PRESET", "LAYERS", "RANKS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        preset, layers, ranks = args.one
        print(json.dumps(one(preset, int(layers), int(ranks))))
        return
    depths = tuple(map(int, args.layers.split(","))) if args.layers else QUICK_DEPTHS if args.quick else LAYERS
    parts: dict[str, Callable[[], Iterator[Table]]] = {
        "layers": lambda: layers_table(depths),
        "gains": lambda: gain_tables(QUICK_LAYERS if args.quick else None),
        "muon": muon_table,
    }
    tables = [table for part in args.parts for table in parts[part]()]
    write(args.json, tables)


if __name__ == "__main__":
    main()
