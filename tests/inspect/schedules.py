"""Schedules built by hand, as data: a stack of linear layers, sharded, with nothing traced or captured."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.buckets import plan_buckets
from fxshard.planner.domain import ZERO, data_parallel
from fxshard.planner.layout import TensorSpec
from fxshard.planner.memory import Buffer, plan_slots
from fxshard.planner.model_groups import ModelGroup
from fxshard.planner.parts import Cuts, Whole
from fxshard.planner.rows import row_layout
from fxshard.planner.units import find_units
from fxshard.schedule.dependencies import with_dependencies
from fxshard.schedule.events import STREAM, Event, Kind, Phase
from fxshard.schedule.graph_summary import BucketUse, GraphSummary
from fxshard.schedule.record import resident_bytes
from fxshard.schedule.schedule import Schedule
from fxshard.schedule.updates import update, updates

WEIGHTS = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down")
FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER


def zero3(
    layers: int = 3,
    ranks: int = 2,
    *,
    prefetch: int = 1,
    keep_last: bool = True,
    carry: int = 0,
    zero: int = 3,
    replicas: int = 1,
    muon: bool = False,
    tensor: int = 1,
) -> Schedule:
    """Build the schedule of a training step over ``layers`` linear layers.

    ``prefetch``: how many layers ahead a gather starts. ``keep_last``: the last layer stays gathered from forward to
    backward. ``carry``: for how many layers the optimizer phase gathers for the next step. ``replicas``: how many ranks
    hold each shard. ``muon``: the weights are matrices of Muon's that lie on several ranks, so they travel. ``tensor``:
    over how many tensor-parallel ranks they are cut.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    domain = data_parallel(ranks, replicas, "mean", "cuda")
    matrices = [f"{layer}.weight" for layer in range(layers)] if muon else []
    buckets = plan_buckets(
        model,
        find_units(model),
        zero=zero,
        ranks=ranks,
        domain_of=lambda name: domain,
        matrices=matrices,
        layout="rows",
        cuts=Cuts(ModelGroup("tp", tensor), tuple(Whole(n, (16 * tensor, 16)) for n in matrices))
        if tensor > 1
        else None,
    )
    by_layer = buckets[::-1]  # buckets are numbered in the order of backward
    events: list[Event] = []
    if buckets[0].resident:
        carry, keep_last = 0, False
    forward = list(by_layer)
    backward = list(buckets)
    kept = {buckets[0].index} if keep_last else set()
    carried = {bucket.index for bucket in by_layer[:carry]} - kept
    events += _pass(forward, FORWARD, prefetch, not_gathered=carried, not_released=kept)
    events += _pass(backward, BACKWARD, prefetch, not_gathered=kept)
    reduced = {event.bucket_index: event for event in events if event.kind is Kind.REDUCE}
    if muon:
        gathers = {index: _event(Kind.UNSHARD, buckets[index], OPTIMIZER) for index in carried}
        events += updates(reduced, buckets, gathers, buckets[0].group("none"))
    else:
        events += [update(reduced[bucket.index], bucket) for bucket in buckets]
        events += [_event(Kind.UNSHARD, bucket, OPTIMIZER) for bucket in by_layer if bucket.index in carried]
    return finished(events, buckets, ranks * replicas, zero)


def drawn(
    layers: int = 3, ranks: int = 8, dim: int = 256, budget: int | None = None, unit: str = "layers", ahead: int = 1
) -> Schedule:
    """A Llama's step under ZeRO-3, in bf16 with fp32 masters, with the names that models have: to be rendered."""
    names = ["head", *(f"{unit}.{i}" for i in reversed(range(layers))), "embed"]
    block: dict[str, tuple[int, ...]] = dict.fromkeys(WEIGHTS, (dim, dim))
    buckets: list[BucketPlan] = []
    for i, name in enumerate(names):
        shapes = block if name.startswith(unit) else {"w": (4 * dim, dim)}
        layout = row_layout([TensorSpec(f"{name}.{part}.weight", shape) for part, shape in shapes.items()], ranks)
        dtypes = torch.bfloat16, torch.float32, torch.float32
        buckets.append(BucketPlan(i, name, name, layout, ZERO[3], *dtypes, True))
    events = [*_pass(buckets[::-1], FORWARD, ahead), *_pass(buckets, BACKWARD, ahead)]
    reduced = {event.bucket_index: event for event in events if event.kind is Kind.REDUCE}
    events += [update(reduced[bucket.index], bucket) for bucket in buckets]
    return replace(finished(events, tuple(buckets), ranks, 3), budget=budget)


def evaluation(layers: int = 3, ranks: int = 2, *, prefetch: int = 1, zero: int = 3) -> Schedule:
    """Build the schedule of an evaluation."""
    step = zero3(layers, ranks, prefetch=prefetch, zero=zero)
    events = _pass(list(step.buckets[::-1]), Phase.EVAL, prefetch)
    return finished(events, step.buckets, ranks, zero)


def finished(events: list[Event], buckets: tuple[BucketPlan, ...], ranks: int, zero: int) -> Schedule:
    """Give the events their places in the arena and their dependencies."""
    placed, arena = _placed(events, buckets)
    graphs = tuple(_summary(events, phase) for phase in (FORWARD, BACKWARD, Phase.EVAL) if _has(events, phase))
    linked = tuple(with_dependencies(placed, buckets))
    return Schedule(linked, buckets, arena, resident_bytes(buckets), ranks, zero, graphs=graphs)


def _has(events: list[Event], phase: Phase) -> bool:
    return any(event.phase is phase for event in events)


def _summary(events: list[Event], phase: Phase) -> GraphSummary:
    """What a graph would say that has one node per stretch."""
    stretches = [event for event in events if event.kind is Kind.COMPUTE and event.phase is phase]

    def uses(field: str) -> tuple[BucketUse, ...]:
        found: dict[int, list[int]] = {}
        for number, event in enumerate(stretches):
            for index in getattr(event, field):
                found.setdefault(index, []).append(number)
        return tuple(BucketUse(index, tuple(found[index])) for index in sorted(found))

    return GraphSummary(phase, len(stretches), uses("reads"), uses("writes"))


def relinked(schedule: Schedule, events: list[Event]) -> Schedule:
    """Take a schedule with other events, whose dependencies are right for their order."""
    return replace(schedule, events=tuple(with_dependencies(events, schedule.buckets)))


def place(schedule: Schedule, kind: Kind, layer: int, phase: Phase) -> int:
    """Position of an event of a layer."""
    found = [i for i, event in schedule.of(kind, phase=phase) if event.bucket == str(layer)]
    assert len(found) == 1, f"{len(found)} {phase} {kind} of layer {layer}"
    return found[0]


def change(schedule: Schedule, i: int, **fields: object) -> Schedule:
    """Take a schedule with one event changed."""
    events = list(schedule.events)
    events[i] = replace(events[i], **fields)  # type: ignore[arg-type]
    return replace(schedule, events=tuple(events))


def _pass(
    order: list[BucketPlan],
    phase: Phase,
    prefetch: int,
    not_gathered: set[int] | frozenset[int] = frozenset(),
    not_released: set[int] | frozenset[int] = frozenset(),
) -> list[Event]:
    """One phase over the layers in the order in which it uses them."""
    events: list[Event] = []
    gathers = [bucket for bucket in order if bucket.index not in not_gathered]
    if phase is BACKWARD:
        gathers = [bucket for bucket in gathers if not bucket.resident]
    launched = 0

    def launch(until: int) -> None:
        nonlocal launched
        while launched < len(gathers) and order.index(gathers[launched]) <= until:
            events.append(_event(Kind.UNSHARD, gathers[launched], phase))
            launched += 1

    launch(prefetch - 1)
    alive: list[BucketPlan] = []
    for k, bucket in enumerate(order):
        launch(k)
        events.append(_event(Kind.WAIT, bucket, phase))
        launch(k + prefetch)
        if phase is not BACKWARD:
            events.append(_compute(phase, reads=(bucket.index,), held=(k + 1) * 1000))
        else:
            events.append(_compute(phase, reads=(bucket.index,), held=(len(order) - k) * 1000))
            if len(alive) == 2:
                events.append(_event(Kind.FINISH, alive.pop(0), phase))
            events.append(_event(Kind.GRAD, bucket, phase))
            events.append(_compute(phase, writes=(bucket.index,), held=(len(order) - k) * 1000))
            events.append(_compute(phase, writes=(bucket.index,), held=(len(order) - k - 1) * 1000))
        if not bucket.resident and bucket.index not in not_released:
            events.append(_event(Kind.RESHARD, bucket, phase))
        if phase is BACKWARD:
            events.append(_event(Kind.REDUCE, bucket, phase))
            if bucket.adds_replicas:
                events.append(_event(Kind.ALL_REDUCE, bucket, phase))
            alive.append(bucket)
    events += [_event(Kind.FINISH, bucket, phase) for bucket in alive]
    return events


def _event(kind: Kind, bucket: BucketPlan, phase: Phase) -> Event:
    on_grads = kind in (Kind.GRAD, Kind.REDUCE, Kind.ALL_REDUCE, Kind.FINISH)
    size = bucket.grad_bytes if on_grads else bucket.gathered_bytes
    return Event(
        kind=kind,
        phase=phase,
        bucket=bucket.name,
        bucket_index=bucket.index,
        params=bucket.params,
        bytes=size // bucket.layout.ranks if kind is Kind.ALL_REDUCE else size,
        dtype=bucket.reduce_dtype if on_grads else bucket.param_dtype,
        group=bucket.group("none", replicas=kind is Kind.ALL_REDUCE),
        stream=STREAM[kind],
        why="by hand",
    )


def _compute(phase: Phase, reads: tuple[int, ...] = (), writes: tuple[int, ...] = (), held: int = 0) -> Event:
    return Event(
        kind=Kind.COMPUTE,
        phase=phase,
        bucket="",
        bucket_index=-1,
        params=(),
        bytes=0,
        dtype=torch.float32,
        group="",
        stream="compute",
        why="a layer",
        reads=reads,
        writes=writes,
        flops=10**9,
        traffic=10**6,
        held=held,
        peak=held,
        nodes=1,
    )


def _placed(events: list[Event], buckets: tuple[BucketPlan, ...]) -> tuple[list[Event], int]:
    """Plan the arena. A buffer that the optimizer phase gathers is alive to the end, and from the start of the step."""
    closing = {Kind.UNSHARD: Kind.RESHARD, Kind.GRAD: Kind.FINISH}
    in_arena: dict[Kind, Callable[[BucketPlan], bool]] = {
        Kind.UNSHARD: lambda bucket: not bucket.resident,
        Kind.GRAD: lambda bucket: bucket.grad_in_arena,
    }
    closes: dict[tuple[Kind, int], list[int]] = {}
    for i, event in enumerate(events):
        closes.setdefault((event.kind, event.bucket_index), []).append(i)
    buffers = []
    for i, event in enumerate(events):
        if event.kind in closing and in_arena[event.kind](buckets[event.bucket_index]):
            stops = [at for at in closes.get((closing[event.kind], event.bucket_index), ()) if at > i]
            start = 0 if event.phase is OPTIMIZER else i  # wraps around: the planner is asked for the whole step
            buffers.append(
                Buffer((event.kind, event.bucket_index, i), event.bytes, start, stops[0] if stops else len(events))
            )
    plan = plan_slots(buffers)
    slots = {key[2]: slot for key, slot in plan.slots.items()}
    gathered = {events[i].bucket_index: slot for i, slot in slots.items() if events[i].phase is OPTIMIZER}
    placed: list[Event] = []
    for i, event in enumerate(events):
        slot = slots.get(i)
        if event.kind is Kind.WAIT:  # reads where the last gather has filled
            slot = gathered.get(event.bucket_index)
        elif event.kind is Kind.UNSHARD and slot is not None:
            gathered[event.bucket_index] = slot
        placed.append(event if slot is None else event.with_slot(slot))
    return placed, plan.bytes
