"""Which mesh and which ZeRO stage is fastest for a model on so many ranks, by simulation, of those that fit.

Each way to cut a model for tensor parallelism is captured once, and scheduled for each way to use the ranks that are
left for data parallelism: stages, and shards over all of them or with replicas (HSDP). The global batch is the same
everywhere: with ``tp`` ranks to a model, each of its data-parallel ranks has ``tp`` times the example inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import fxshard
from fxshard._torch.errors import BudgetError
from fxshard.bench.captured import Captured, capture
from fxshard.frontend.planned_mesh import Parallelize, parallelized, planned_mesh
from fxshard.plan.hardware import Hardware
from fxshard.schedule.record import resident_bytes

ROOM = 0.9
"""Share of a device's memory that shards, arena and activations may take: the rest is the allocator's and NCCL's."""
STEP = 4
"""Shards of a replica are tried in powers of this."""


@dataclass(frozen=True)
class Choice:
    """A way to use the ranks."""

    tensor: int
    shards: int
    replicas: int
    zero: int

    @property
    def mesh(self) -> str:
        parts = [f"dp {self.shards * self.replicas}"] + [f"tp {self.tensor}"] * (self.tensor > 1)
        return " × ".join(parts)


@dataclass(frozen=True)
class Found:
    """What a simulated step of it takes; without ``seconds``, it does not fit."""

    choice: Choice
    bytes: int
    """Shards, arena and activations; of what does not fit, the least that it would take."""
    seconds: float | None = None
    exposed: float = 0.0
    gathered: int = 0
    """Bytes that one rank's collectives move."""


def choices(world_size: int, tensor: int, machine: Hardware, stages: Sequence[int]) -> Iterator[Choice]:
    """The ways to use the ranks that ``tensor`` ranks to a model leave; the widest shards first."""
    ranks = world_size // tensor
    least = max(1, machine.ranks_per_node // tensor)  # a replica within a node
    for zero in stages:
        shards = ranks
        while shards >= 1:
            if zero > 0 or shards == ranks:  # what is not sharded has no replicas
                yield Choice(tensor, shards, ranks // shards, zero)
            if shards <= least or shards % STEP:
                break
            shards //= STEP


def search(
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]],
    world_size: int,
    machine: Hardware,
    *,
    tensor: Sequence[int] = (1,),
    parallelize: Parallelize | None = None,
    stages: Sequence[int] = (1, 2, 3),
    precision: fxshard.Precision | None = None,
    report: Callable[[str], None] = lambda what: None,
) -> list[Found]:
    """What was found for each choice, the fastest first; what does not fit comes last."""
    found: list[Found] = []
    for ranks in tensor:
        report(f"capturing, tp {ranks}")
        model, inputs = build()
        inputs = tree_map_only(torch.Tensor, lambda value, ranks=ranks: _more(value, ranks), inputs)
        with contextlib.ExitStack() as stack:
            if ranks > 1:
                mesh = stack.enter_context(planned_mesh({"dp": world_size // ranks, "tp": ranks}, "cuda")).mesh
                model = parallelized(model, parallelize, mesh)
            captured = capture(model, inputs, precision=precision, hardware=machine)
            for choice in choices(world_size, ranks, machine, stages):
                report(f"{choice.mesh}, {choice.shards} shards, ZeRO-{choice.zero}")
                found.append(_simulated(captured, choice, machine))
    return sorted(found, key=lambda each: (each.seconds is None, each.seconds or each.bytes))


def _more(value: torch.Tensor, times: int) -> torch.Tensor:
    return value if times == 1 else value.repeat(times, *[1] * (value.dim() - 1))


def _simulated(captured: Captured, choice: Choice, machine: Hardware) -> Found:
    room = int(machine.memory_bytes * ROOM)
    options: dict[str, Any] = {
        "ranks": choice.shards * choice.replicas,
        "replicas": choice.replicas,
        "stride": choice.tensor,
        "zero": choice.zero,
        "hardware": machine,
        "optimizer": fxshard.AdamW(),
    }
    held = captured.activation_bytes
    at_rest = resident_bytes(captured.buckets(**options))
    if at_rest + held > room:  # whatever the order of events
        return Found(choice, at_rest + held)
    try:
        schedule = captured.schedule(**options, memory_budget=room - held)
    except BudgetError as error:
        return Found(choice, error.smallest + captured.activation_bytes)
    held = captured.activation_bytes  # known by now
    if schedule.peak_bytes + held > room:
        return Found(choice, schedule.peak_bytes + held)
    run = schedule.simulate(machine)
    return Found(choice, schedule.peak_bytes + held, run.step_seconds, run.exposed_seconds, schedule.comm_bytes)


def rows(found: Sequence[Found], tokens: int) -> Iterator[tuple[str, ...]]:
    """As text, for a table; ``tokens``: of the global batch."""
    for each in found:
        choice = each.choice
        shards = f"{choice.shards}" + f" × {choice.replicas} replicas" * (choice.replicas > 1)
        about = (choice.mesh, shards, str(choice.zero))
        memory = f"{each.bytes / 2**30:.1f}"
        if each.seconds is None:
            yield *about, "–", "–", "–", f"{memory}: too much"
            continue
        share = f"{each.exposed / each.seconds:.1%}"
        ranks = choice.tensor * choice.shards * choice.replicas
        yield *about, f"{each.seconds * 1e3:.0f}", f"{tokens / each.seconds / ranks:.0f}", share, memory


HEAD = ("mesh", "shards", "ZeRO", "step ms", "tokens/s per GPU", "exposed", "GiB")
