"""The optimizer step as a program: what is updated when, what travels, and which buckets are ready to be gathered.

All gradients are reduced when a step begins, so buckets are updated in the order in which the next forward needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.exchange import Batch, plan_exchange

Item = TypeVar("Item")
ADAMW_NUMEL, MUON_NUMEL = 2**27, 2**30
"""Elements of a rank's shards that are updated together. Equal matrices of all buckets in a group make one batch, and
a launch costs the host what a batch costs it, so Muon's groups are large: on an H200 groups of 2**27 made the step of
112 matrices wait for the host (110 ms, with 2**30 54 ms). Temporaries take about 10 bytes per element, at a time when
there are no activations."""


@dataclass(frozen=True)
class Exchange:
    """Start sending a batch of matrices to their owners."""

    batch: Batch


@dataclass(frozen=True)
class Local:
    """Update what needs no other rank: AdamW's parameters, and matrices that lie on this rank alone."""

    buckets: tuple[int, ...]


@dataclass(frozen=True)
class Orthogonalize:
    """Owners compute the matrices of a batch and start sending the result back."""

    batch: Batch


@dataclass(frozen=True)
class Land:
    """Apply the directions that came back."""

    batch: Batch


@dataclass(frozen=True)
class Share:
    """Replicas send each other the parts of their shards that they updated."""

    buckets: tuple[int, ...]


@dataclass(frozen=True)
class Done:
    """The buckets have their new values: the next forward may gather them."""

    buckets: tuple[int, ...]


StepInstruction = Exchange | Local | Share | Orthogonalize | Land | Done


def plan_step(buckets: Sequence[BucketPlan]) -> tuple[StepInstruction, ...]:
    """One batch is being sent to its owners while the one before is computed and the one before that comes back."""
    batches = plan_exchange(buckets)
    last_batch = {index: i for i, batch in enumerate(batches) for index in batch.buckets}
    program: list[StepInstruction] = [Exchange(batches[0])] if batches else []
    groups = _groups(buckets)
    for group in groups:
        program.append(Local(group))
        shared = tuple(index for index in group if buckets[index].shares_state)
        if shared:
            program.append(Share(shared))
        settled = tuple(index for index in group if index not in last_batch)
        if settled:
            program.append(Done(settled))
    for i, batch in enumerate(batches):
        if i + 1 < len(batches):
            program.append(Exchange(batches[i + 1]))
        program.append(Orthogonalize(batch))
        if i > 0:
            program += _landed(batches, i - 1, last_batch)
    if batches:
        program += _landed(batches, len(batches) - 1, last_batch)
    return tuple(program)


def _landed(batches: Sequence[Batch], i: int, last_batch: dict[int, int]) -> list[StepInstruction]:
    complete = tuple(index for index in batches[i].buckets if last_batch[index] == i)
    return [Land(batches[i]), *([Done(complete)] if complete else [])]


def _groups(buckets: Sequence[BucketPlan]) -> list[tuple[int, ...]]:
    """Neighbouring buckets, as many as are worth a batch and no more than memory for temporaries allows."""
    groups: list[tuple[int, ...]] = []
    for muon, stretch in groupby((b for b in reversed(buckets) if b.trainable), key=lambda b: bool(b.matrices)):
        limit = MUON_NUMEL if muon else ADAMW_NUMEL
        for part in parts_within(stretch, lambda bucket: bucket.layout.shard_numel, limit):
            groups.append(tuple(bucket.index for bucket in part))
    return groups


def parts_within(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Items in order, cut into parts that have a size of ``limit`` in all at most, or one item."""
    part: list[Item] = []
    total = 0
    for item in items:
        if part and total + size(item) > limit:
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part
