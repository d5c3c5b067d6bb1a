"""Which mesh and which ZeRO stage is fastest for a model on so many ranks, by simulation, of those that fit.

Each way to cut a model for tensor parallelism is captured once, in a process of its own, and scheduled for each way to
use the ranks that are left for data parallelism: stages, and shards over all of them or with replicas (HSDP). The
global batch is the same everywhere: with ``tp`` ranks to a model, each of its data-parallel ranks has ``tp`` times the
example inputs.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import fxshard
from fxshard._torch.errors import BudgetError
from fxshard.bench.captured import Captured, capture
from fxshard.bench.harness import Column, Row, Table
from fxshard.bench.target import load, parallelizing
from fxshard.frontend.planned_mesh import parallelized, planned_mesh
from fxshard.planner.hardware import Hardware
from fxshard.schedule.record import resident_bytes

PRECISION = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)
ROOM = 0.9
"""Share of a device's memory that shards, arena and activations may take: the rest is the allocator's and NCCL's."""
REPLICAS = (1, 8)
"""Numbers of replicas of a shard to try, as far as a replica still fills a node."""


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
    """The time and memory of a simulated step; without ``seconds``, it does not fit."""

    choice: Choice
    bytes: int
    """Shards, arena and activations; of what does not fit, the least that it would take, or shards where they alone
    are too much."""
    seconds: float | None = None
    exposed: float = 0.0


@dataclass(frozen=True)
class Search:
    """The model, the machine and the stages of a search."""

    target: str
    """A model as :func:`fxshard.bench.target.load` takes it."""
    world_size: int
    machine: Hardware
    layers: int | None = None
    stages: tuple[int, ...] = (1, 2, 3)

    def choices(self, tensor: int) -> Iterator[Choice]:
        """The ways to use the ranks that ``tensor`` ranks to a model leave.

        What takes least memory comes first: with its activations known, others need not be scheduled to see that they
        do not fit.
        """
        ranks = self.world_size // tensor
        for zero in sorted(self.stages, reverse=True):
            for replicas in REPLICAS:
                fills = ranks // replicas * tensor >= self.machine.ranks_per_node
                if replicas == 1 or (ranks % replicas == 0 and fills and zero > 0):
                    yield Choice(tensor, ranks // replicas, replicas, zero)

    def run(
        self, tensor: Sequence[int], processes: int, report: Callable[[str], None] = lambda what: None
    ) -> list[Found]:
        """The result of each choice, the fastest first; choices that do not fit come last."""
        found: list[Found] = []
        context = multiprocessing.get_context("forkserver")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            # Those that take longest first.
            jobs = {pool.submit(_of_tensor_size, self, ranks): ranks for ranks in sorted(tensor, reverse=True)}
            for job in as_completed(jobs):
                report(f"tp {jobs[job]} is done")
                found += job.result()
        return sorted(found, key=lambda each: (each.seconds is None, each.seconds or each.bytes))


def _of_tensor_size(search: Search, ranks: int) -> list[Found]:
    """All choices with so many ranks to a model."""
    gc.disable()  # looking through all graphs again and again would take a sixth of the time
    model, inputs = load(search.target, search.layers)
    inputs = tree_map_only(torch.Tensor, lambda value: value.repeat(ranks, *[1] * (value.dim() - 1)), inputs)
    with contextlib.ExitStack() as stack:
        if ranks > 1:
            parallelize = parallelizing(search.target, model)
            shape = {"dp": search.world_size // ranks, "tp": ranks}
            model = parallelized(model, parallelize, stack.enter_context(planned_mesh(shape, "cuda")).mesh)
        captured = capture(model, inputs, precision=PRECISION, hardware=search.machine)
        found = []
        for choice in search.choices(ranks):
            found.append(_simulated(captured, choice, search.machine))
            captured.inserted.clear()  # no other choice has the same events
        return found


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
    at_rest = resident_bytes(captured.buckets(**options))
    if at_rest > room:  # whatever is computed again
        return Found(choice, at_rest)
    try:  # what is left may be used for buckets that stay; where too little is, backward computes values again
        schedule = captured.schedule(**options, memory_budget=room)
    except BudgetError as error:
        return Found(choice, error.smallest)
    run = schedule.simulate(machine)
    return Found(choice, schedule.peak_bytes, run.step_seconds, run.exposed_seconds)


COLUMNS = (
    Column("shards", "shards"),
    Column("zero", "ZeRO", ".0f"),
    Column("step_ms", "step ms", ".0f"),
    Column("tokens", "tokens/s per GPU", ".0f"),
    Column("exposed", "exposed", ".1%"),
    Column("memory", "GiB"),
)


def table(found: Sequence[Found], tokens: int) -> Table:
    """``tokens``: of the global batch."""
    return Table("", COLUMNS, [_row(each, tokens) for each in found], names="mesh")


def _row(found: Found, tokens: int) -> Row:
    choice = found.choice
    shards = f"{choice.shards}" + f" × {choice.replicas} replicas" * (choice.replicas > 1)
    row: Row = {"name": choice.mesh, "shards": shards, "zero": choice.zero, "memory": found.bytes / 2**30}
    if found.seconds is None:
        return {**row, "memory": f"{row['memory']:.1f}: too much"}
    ranks = choice.tensor * choice.shards * choice.replicas
    row |= {"step_ms": found.seconds * 1e3, "tokens": tokens / found.seconds / ranks}
    return {**row, "exposed": found.exposed / found.seconds}
