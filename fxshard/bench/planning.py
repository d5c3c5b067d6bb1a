"""What planning costs, and what it gains: the tables of docs/planning-figures.md.

python -m fxshard.bench.planning            # all three parts
python -m fxshard.bench.planning --quick    # the third with 16 layers of each model
python -m fxshard.bench.planning --parts layers
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

import fxshard
from fxshard import backend
from fxshard.events import Kind, Phase, events
from fxshard.inspect.presets import PRESETS
from fxshard.inspect.record import record, resident_bytes
from fxshard.inspect.schedule import Schedule
from fxshard.inspect.simulate import Simulation
from fxshard.passes import pipeline
from fxshard.passes.context import PassContext
from fxshard.passes.order_prefetch import order_prefetch
from fxshard.passes.plan_memory import plan_memory
from fxshard.plan.buckets import plan_buckets
from fxshard.plan.hardware import Hardware
from fxshard.plan.hardware import hardware as known
from fxshard.plan.units import find_units

LAYERS = (8, 16, 32, 64, 80)
QUICK_LAYERS = 16
RANKS = (8, 64, 1024)
HARDWARE = ("h100", "h200", "gb200")
PRECISION = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)


# -- one capture, many schedules ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """A step as graphs without events: what no choice of ranks, machine or budget changes."""

    model: nn.Module
    graphs: dict[Phase, fx.GraphModule]
    context: PassContext
    precision: fxshard.Precision | None
    zero: int

    def schedule(self, *, ranks: int, hardware: str | Hardware, fsdp2: bool = False, **options: Any) -> Schedule:
        """As ``fxshard.plan`` gives it. With ``fsdp2``, ordered by its rule: one ahead, and the last bucket kept."""
        buckets = plan_buckets(
            self.model, find_units(self.model), zero=self.zero, ranks=ranks, precision=self.precision
        )
        machine = known(hardware)
        given = replace(self.context.options, hardware=machine, **options)
        context = replace(
            self.context, buckets=buckets, options=given, group=f"cuda×{ranks}", ranks=ranks, hardware=machine
        )
        run = _fsdp2 if fsdp2 else pipeline.schedule
        graphs = {phase: fx.GraphModule(module, copy.deepcopy(module.graph)) for phase, module in self.graphs.items()}
        scheduled, memory = run(graphs, context, resident_bytes(buckets))
        return record(scheduled, buckets, memory, ranks=ranks, zero=self.zero, budget=given.memory_budget)


class _Enough(Exception):
    """Thrown in place of scheduling: the graphs are there."""


def capture(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    zero: int = 3,
    precision: fxshard.Precision | None = None,
    lowering: str = "inductor",
) -> Captured:
    """Capture a step once, by planning it up to where it would be scheduled."""
    found: list[tuple[dict[Phase, fx.GraphModule], PassContext]] = []

    def keep(modules: Mapping[Phase, fx.GraphModule], context: PassContext, resident: int) -> Any:
        found.append((dict(modules), context))
        raise _Enough

    with mock.patch.object(backend, "schedule", keep), _until(_Enough):
        fxshard.plan(model, inputs, world_size=2, zero=zero, precision=precision, lowering=lowering)
    ((graphs, context),) = found
    return Captured(model, graphs, context, precision, zero)


@contextmanager
def _until(kind: type[Exception]) -> Iterator[None]:
    """Swallow an exception, and those that Dynamo wraps around it."""
    try:
        yield
    except Exception as error:
        causes: list[BaseException | None] = [error]
        while causes[-1] is not None and not isinstance(causes[-1], kind):
            causes.append(causes[-1].__cause__ or getattr(causes[-1], "inner_exception", None))
        if causes[-1] is None:
            raise


def _fsdp2(
    modules: dict[Phase, fx.GraphModule], context: PassContext, resident: int
) -> tuple[dict[Phase, fx.GraphModule], Any]:
    """Each gather starts when the bucket before it is in use, and what forward uses last stays for backward."""
    context = replace(context, options=replace(context.options, prefetch=1, keep_resident=False, defer_wgrad=False))
    for phase, module in modules.items():
        at = replace(context, phase=phase)
        for run in pipeline.INSERTING[phase]:
            module = run(module, at)
        modules[phase] = order_prefetch(module, at)
    last = [event for _, event in events(modules[Phase.FORWARD].graph) if event.kind is Kind.WAIT][-1].bucket_index
    for phase, kind in ((Phase.FORWARD, Kind.RESHARD), (Phase.BACKWARD, Kind.UNSHARD)):
        for node, event in list(events(modules[phase].graph)):
            if event.kind is kind and event.bucket_index == last:
                modules[phase].graph.erase_node(node)
    return modules, plan_memory(modules, context)


# -- tables ------------------------------------------------------------------------------------------------------------

RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "roomy": {"roomy": True},
    "one ahead": {"prefetch": 1, "defer_wgrad": False},
    "FSDP2": {"fsdp2": True},
}
"""What is compared. *roomy* may use the share ``ROOM`` of the device's memory for shards and arena."""

ROOM = 0.7
CARRIED = 2
"""Gathers of the next step's start that the steady step runs in the optimizer phase."""


def cost(preset: str, layers: int | None, ranks: int) -> dict[str, float]:
    """Seconds and peak memory of one plan, in a process of its own."""
    command = [sys.executable, "-m", "fxshard.bench.planning", "--one", preset, str(layers or 0), str(ranks)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def one(preset: str, layers: int, ranks: int) -> dict[str, float]:
    """Plan here, and say what it took. Importing torch is part of the memory and not of the time."""
    import resource

    model, inputs = PRESETS[preset](layers or None)
    started, busy = time.perf_counter(), time.process_time()
    schedule = fxshard.plan(model, inputs, world_size=ranks, hardware="h200", precision=PRECISION)
    seconds, cpu = time.perf_counter() - started, time.process_time() - busy
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return {"seconds": seconds, "cpu": cpu, "gib": gib, "events": len(schedule)}


def gains(preset: str, layers: int | None) -> Iterator[tuple[str, int, dict[str, Simulation | None]]]:
    """(hardware, ranks, {rule: simulated step, None where it does not fit}) of one model."""
    captured = capture(*PRESETS[preset](layers), precision=PRECISION)
    for ranks in RANKS:
        for hardware in HARDWARE:
            found: dict[str, Simulation | None] = {}
            for rule, options in RULES.items():
                schedule = _schedule(captured, ranks, hardware, dict(options))
                found[rule] = schedule.simulate(hardware) if schedule is not None else None
                if rule == "default" and schedule is not None:
                    found["steady"] = carry_first_gathers(schedule, CARRIED).simulate(hardware)
            yield hardware, ranks, found


def _schedule(captured: Captured, ranks: int, hardware: str, options: dict[str, Any]) -> Schedule | None:
    if options.pop("roomy", False):
        options["memory_budget"] = int(known(hardware).memory_bytes * ROOM)
    try:
        return captured.schedule(ranks=ranks, hardware=hardware, **options)
    except fxshard.BudgetError:
        return None


def carry_first_gathers(schedule: Schedule, count: int) -> Schedule:
    """The step in which the first gathers of forward run in the optimizer phase of the step before.

    Each starts behind the update of its bucket. Only what the simulator looks at is right about it: the arena may need
    more places than it has.
    """
    events = list(schedule.events)
    first = [i for i, event in schedule.of(Kind.UNSHARD, phase=Phase.FORWARD)][:count]
    moved = {events[i].bucket_index: events[i] for i in first}
    old: list[int] = []  # positions in the schedule as it was, -1 for a gather in its new place
    for i, event in enumerate(events):
        if i not in first:
            old.append(i)
            if event.kind is Kind.UPDATE and event.bucket_index in moved:
                old.append(-1 - event.bucket_index)
    place = {position: new for new, position in enumerate(old) if position >= 0}
    result = []
    for new, position in enumerate(old):
        if position >= 0:
            needs = tuple(place[need] for need in events[position].waits_for if need in place)
            result.append(replace(events[position], waits_for=needs))
        else:
            result.append(replace(moved[-1 - position], phase=Phase.OPTIMIZER, waits_for=(new - 1,)))
    return replace(schedule, events=tuple(result))


def print_cost() -> None:
    print("\n## Cost: llama-70b on 1024 ranks\n", flush=True)
    _table(("layers", "seconds", "CPU seconds", "peak GiB", "events"), [_cost_row(80)])


def print_layers() -> None:
    print("\n## Cost by layers: llama-70b on 1024 ranks\n", flush=True)
    _table(("layers", "seconds", "CPU seconds", "peak GiB", "events"), (_cost_row(layers) for layers in LAYERS))


def _cost_row(layers: int) -> list[str]:
    found = cost("llama-70b", layers, 1024)
    seconds, cpu = f"{found['seconds']:.1f}", f"{found['cpu']:.1f}"
    return [str(layers), seconds, cpu, f"{found['gib']:.2f}", f"{found['events']:.0f}"]


def print_gains(layers: int | None) -> None:
    for preset in PRESETS:
        about = f", {layers} layers" if layers else ""
        print(f"\n## Gain: {preset}{about}, milliseconds per step\n", flush=True)
        head = ["hardware", "ranks", "compute", "bound"]
        head += [f"{rule}: step (exposed)" for rule in SHOWN]
        _table([*head, *[f"{rule} / bound" for rule in OURS]], (_gain_row(*row) for row in gains(preset, layers)))


OURS = ("default", "steady", "roomy")
SHOWN = (*OURS, "one ahead", "FSDP2")


def _gain_row(hardware: str, ranks: int, found: dict[str, Simulation | None]) -> list[str]:
    ours = found["default"]
    assert ours is not None
    row = [hardware, str(ranks), f"{ours.compute_seconds * 1e3:.1f}", f"{ours.bound_seconds * 1e3:.1f}"]
    for rule in SHOWN:
        step = found[rule]
        row.append("–" if step is None else f"{step.step_seconds * 1e3:.1f} ({step.exposed_seconds * 1e3:.1f})")
    ratios = (found[rule] for rule in OURS)
    return [*row, *["–" if step is None else f"{step.step_seconds / step.bound_seconds:.3f}" for step in ratios]]


def _table(head: Sequence[str], rows: Any) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("cost", "layers", "gains"), default=("cost", "layers", "gains"))
    parser.add_argument("--quick", action="store_true", help=f"gains with {QUICK_LAYERS} layers of each model")
    parser.add_argument("--one", nargs=3, metavar=("PRESET", "LAYERS", "RANKS"), help="plan once, print its cost")
    args = parser.parse_args(argv)
    if args.one:
        preset, layers, ranks = args.one
        print(json.dumps(one(preset, int(layers), int(ranks))))
        return
    parts: dict[str, Callable[[], None]] = {
        "cost": print_cost,
        "layers": print_layers,
        "gains": lambda: print_gains(QUICK_LAYERS if args.quick else None),
    }
    for part in args.parts:
        parts[part]()


if __name__ == "__main__":
    main()
