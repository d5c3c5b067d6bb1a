"""Where in a step a rank holds most, with gradients that come one after the other; and the largest things it holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxshard._torch import private
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.schedule.activations import step_activations
from fxshard.schedule.events import Event, Kind, Phase, event_of
from fxshard.schedule.graph_summary import unpacks
from fxshard.schedule.schedule import Schedule, size


@dataclass(frozen=True)
class Peak:
    """The position of the event, what a rank has allocated then, and the gradients among it."""

    index: int
    bytes: int
    gradients: int


def peak_of(schedule: Schedule) -> Peak:
    """The peak of a step that begins without gradients. Those of a shard are made when the first of them is there."""
    late = {bucket.index: late_bytes(bucket) for bucket in schedule.buckets}
    held = schedule.resident_bytes + schedule.arena_bytes - sum(late.values())
    made = 0
    found = Peak(0, held, 0)
    for i, event in enumerate(schedule.events):
        kinds = (Kind.REDUCE, Kind.ACCUMULATE) if _apart(schedule, event) else (Kind.GRAD,)
        if event.kind in kinds:
            made += late.pop(event.bucket_index, 0)
        if held + made + event.peak > found.bytes:
            found = Peak(i, held + made + event.peak, made)
    return found


def late_bytes(bucket: BucketPlan) -> int:
    """The part of what a bucket holds at rest that backward allocates: the gradient of the shard."""
    return bucket.layout.shard_numel * bucket.master_dtype.itemsize if bucket.trainable else 0


def _apart(schedule: Schedule, event: Event) -> bool:
    """Whether full gradients have a place of their own, so that the shard's is made only by the reduction."""
    if event.bucket_index < 0:
        return False
    bucket = schedule.buckets[event.bucket_index]
    return bucket.grad_in_arena or (bucket.layout.ranks > 1 and not bucket.placement.grad)


MOST = 10


@dataclass(frozen=True)
class Thing:
    """A use of memory: shards of all parameters, the arena, or values of one kind in all layers."""

    name: str
    bytes: int
    count: int = 1

    def __str__(self) -> str:
        return f"{size(self.bytes)} {self.name}" + (f" (of {self.count} values)" if self.count > 1 else "")


def largest(schedule: Schedule, graphs: Mapping[Phase, fx.GraphModule], fused: bool) -> tuple[Thing, ...]:
    """The ten largest, with the values that are alive where activations take most."""
    held = step_activations(graphs, fused)
    where = max(held.values(), key=lambda each: max(each.during.values(), default=0))
    node = max(where.during, key=where.during.__getitem__)
    origin = {each.name: each for phase in held.values() for each in reversed(phase.nodes) if each.op != "placeholder"}
    kinds: dict[str, list[int]] = {}
    for value in where.alive_at(node):
        kinds.setdefault(_name(origin.get(value.node.name, value.node)), []).append(value.bytes)
    rest = [bucket.at_rest() for bucket in schedule.buckets]
    things = [
        Thing("parameters", sum(each.param for each in rest)),
        Thing("gradients", sum(each.grad for each in rest)),
        Thing("masters and optimizer state", sum(each.state for each in rest)),
        Thing("arena of gathered parameters and full gradients", schedule.arena_bytes),
        *(Thing(name, sum(sizes), len(sizes)) for name, sizes in kinds.items()),
    ]
    found = sorted((thing for thing in things if thing.bytes), key=lambda thing: -thing.bytes)
    return tuple(found[:MOST])


def _name(node: fx.Node) -> str:
    """The module that computes a value, layers counted as ``*``, and the operator."""
    if node.op == "placeholder" or unpacks(node):
        return "inputs"
    event = event_of(node)
    if event is not None and event.op:
        return f"{event.op}, back from the host"
    made = node.all_input_nodes[0] if private.operator_of(node) is None and node.all_input_nodes else node
    target = private.operator_of(made)
    operator = private.operator_name(target) if target is not None else str(made.target)
    path = re.sub(r"(?<![^.])\d+(?![^.])", "*", private.module_path(made))
    return f"{path} {operator}".strip()
