"""Schedules drawn by hand, with a made-up timeline: what rendering is tested on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.domain import ZERO
from fxshard.planner.layout import TensorSpec
from fxshard.planner.memory import SlotRange
from fxshard.planner.rows import row_layout
from fxshard.schedule.events import STREAM, Event, Kind, Phase
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.simulate import Simulation, Span

WEIGHTS = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down")


def bucket(index: int, unit: str, shapes: dict[str, tuple[int, ...]], ranks: int) -> BucketPlan:
    """A trained bucket in bf16 with fp32 masters."""
    layout = row_layout([TensorSpec(f"{unit}.{name}.weight", shape) for name, shape in shapes.items()], ranks)
    return BucketPlan(index, unit, unit, layout, ZERO[3], torch.bfloat16, torch.float32, torch.float32, True)


def drawn(
    layers: int = 3, ranks: int = 8, dim: int = 256, budget: int | None = None, unit: str = "layers", ahead: int = 1
) -> Schedule:
    """A Llama's step under ZeRO-3: gathers `ahead` layers ahead, two places in the arena for each use."""
    units = ["embed", *(f"{unit}.{i}" for i in range(layers)), "head"]
    block: dict[str, tuple[int, ...]] = dict.fromkeys(WEIGHTS, (dim, dim))
    buckets: list[BucketPlan] = []
    for name in reversed(units):
        buckets.append(bucket(len(buckets), name, block if name.startswith(unit) else {"w": (4 * dim, dim)}, ranks))
    by_name = {plan.name: plan for plan in buckets}
    big = max(plan.gathered_bytes for plan in buckets)
    places = ahead + 1
    events: list[Event] = []

    def add(kind: Kind, phase: Phase, name: str, why: str, **fields: Any) -> None:
        plan = by_name[name]
        grads = kind in (Kind.GRAD, Kind.REDUCE, Kind.FINISH)
        bytes_, dtype = (plan.grad_bytes, torch.float32) if grads else (plan.gathered_bytes, torch.bfloat16)
        stream = STREAM.get(kind, "compute")
        events.append(Event(kind, phase, name, plan.index, plan.params, bytes_, dtype, "ranks", stream, why, **fields))

    def compute(phase: Phase, name: str, writes: bool) -> None:
        plan = by_name[name]
        events.append(
            Event(
                Kind.COMPUTE, phase, "", -1, (), 0, torch.float32, "", "compute", f"mm_{plan.index} … add_{plan.index}",
                reads=(plan.index,), writes=(plan.index,) if writes else (),
                flops=plan.layout.numel * 2 * 4096 * (1 + writes), traffic=plan.gathered_bytes * 3,
                held=units.index(name) * dim * 4096,
                peak=units.index(name) * dim * 4096,
            )
        )  # fmt: skip

    def walk(phase: Phase, order: list[str]) -> None:
        def gather(k: int) -> None:
            if k < len(order):
                why = f"{ahead} ahead: starts with {order[k - ahead]}" if k >= ahead else "at the start"
                slot = SlotRange((k % places) * big, by_name[order[k]].gathered_bytes)
                add(Kind.UNSHARD, phase, order[k], why, slot=slot)

        for k in range(ahead):
            gather(k)
        for k, name in enumerate(order):
            add(Kind.WAIT, phase, name, f"first use: {by_name[name].params[0]}")
            gather(k + ahead)
            if phase is Phase.BACKWARD:
                if k >= 2:
                    add(Kind.FINISH, phase, order[k - 2], f"makes room for {name}")
                slot = SlotRange(places * big + (k % 2) * 2 * big, by_name[name].grad_bytes)
                add(Kind.GRAD, phase, name, f"first gradient: {by_name[name].params[-1]}", slot=slot)
            compute(phase, name, phase is Phase.BACKWARD)
            add(Kind.RESHARD, phase, name, "last use")
            if phase is Phase.BACKWARD:
                add(Kind.REDUCE, phase, name, f"complete with {by_name[name].params[0]}")

    walk(Phase.FORWARD, units)
    walk(Phase.BACKWARD, units[::-1])
    for name in (units[1], units[0]):
        add(Kind.FINISH, Phase.BACKWARD, name, "end of backward")
    for name in units[::-1]:
        add(Kind.UPDATE, Phase.OPTIMIZER, name, "gradient is reduced")
    resident = sum(sum((r.param, r.grad, r.state)) for r in (plan.at_rest() for plan in buckets))
    return Schedule(_linked(events), tuple(buckets), (places + 4) * big, resident, ranks, 3, budget)


def _linked(events: list[Event]) -> tuple[Event, ...]:
    """Say what waits for what: for the collective, for the gradient to be written, for the place to be free."""
    cause = {Kind.WAIT: Kind.UNSHARD, Kind.FINISH: Kind.REDUCE, Kind.UPDATE: Kind.REDUCE, Kind.REDUCE: Kind.GRAD}
    frees = {Kind.UNSHARD: Kind.RESHARD, Kind.GRAD: Kind.REDUCE}
    latest: dict[tuple[Kind, str], int] = {}
    user: dict[int, str] = {}  # of the place at this offset
    linked = []
    for i, event in enumerate(events):
        needs = {latest.get((cause.get(event.kind, Kind.COMPUTE), event.bucket))}
        if event.slot is not None:
            needs.add(latest.get((frees[event.kind], user.get(event.slot.offset, ""))))
            user[event.slot.offset] = event.bucket
        if event.kind in (Kind.REDUCE, Kind.RESHARD):
            needs.add(next(k for k in range(i - 1, -1, -1) if events[k].kind is Kind.COMPUTE))
        linked.append(replace(event, waits_for=tuple(sorted(need for need in needs if need is not None))))
        latest[event.kind, event.bucket] = i
    return tuple(linked)


def timed(schedule: Schedule, flops: float = 400e12, bandwidth: float = 100e9) -> Simulation:
    """A timeline: each stream in order, each event after what it waits for."""
    free = dict.fromkeys(("compute", "gather", "reduce"), 0.0)
    stop: list[float] = []
    spans, memory, held = [], [(0.0, schedule.resident_bytes)], schedule.resident_bytes
    slots: dict[tuple[str, str], int] = {}
    exposed, activations = 0.0, 0
    for i, event in enumerate(schedule.events):
        long = 0.0
        if event.kind is Kind.COMPUTE:
            long = event.flops / flops
        elif event.kind in (Kind.UNSHARD, Kind.REDUCE):
            long = event.bytes / bandwidth + 2e-5
        elif event.kind is Kind.UPDATE:
            long = event.bytes / 1e13
        ready = max([free["compute"], *(stop[need] for need in event.waits_for)])
        start = max(free[event.stream], ready)
        began = free["compute"] if event.kind is Kind.WAIT else start  # compute stands still until the gather is done
        if event.stream == "compute":
            exposed += start - free["compute"]
        free[event.stream] = start + long
        stop.append(start + long)
        spans.append(Span(i, event.stream, began, start + long))
        if event.kind in (Kind.UNSHARD, Kind.GRAD) and event.slot is not None:
            slots[event.stream, event.bucket] = event.slot.bytes
            held += event.slot.bytes
            memory.append((start, held))
        if event.kind in (Kind.COMPUTE, Kind.UPDATE):
            held, activations = held + event.held - activations, event.held
            memory.append((start + long, held))
        if event.kind in (Kind.RESHARD, Kind.FINISH):
            held -= slots.pop(("gather" if event.kind is Kind.RESHARD else "compute", event.bucket), 0)
            memory.append((start, held))
    busy = {
        stream: sum(
            s.stop - s.start for s in spans if s.stream == stream and schedule.events[s.index].kind is not Kind.WAIT
        )
        for stream in free
    }
    communication = busy["gather"] + busy["reduce"]
    return Simulation(
        max(stop), busy["compute"], communication, exposed, max(busy.values()),
        tuple(spans), tuple(sorted(memory)), peak_bytes=max(held for _, held in memory),
    )  # fmt: skip
