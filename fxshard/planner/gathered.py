"""Buckets whose unsharded parameters are quantized: what rests, what travels, and what a graph is given.

A *flat copy* is one quantized copy of a stretch of a bucket: a byte per element, and a scale per 32 of them. Parameters
start at multiples of 64 elements and boundaries between ranks fall between groups of 32 rows, so the scales of element
``i`` are at ``i / 32`` whichever way the blocks run, and the flat copies of the shards, one after another, are the flat
copy of the bucket. Payloads and scales travel compact, in a collective each, and nothing is copied out afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxshard.kernels.mxfp8 import BLOCK, COLUMNWISE, E4M3, ROWWISE, Quantized
from fxshard.kernels.quantize import quantize_into
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.gather_modes import Copies

VIEWS = 4
"""Inputs of a graph for each parameter: rowwise payload and scales, columnwise payload and scales."""

Views = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Place:
    """Where a matrix, a stack of them, or an owner's part of either lies in a flat copy."""

    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)

    @property
    def as_matrix(self) -> Place:
        """A stack as one tall matrix: 32 divides the rows of each of its matrices, so blocks are the same."""
        return Place(self.offset, (math.prod(self.shape[:-1]), self.shape[-1]))


@dataclass(frozen=True)
class FlatCopy:
    """One quantized copy of a stretch of elements."""

    data: torch.Tensor
    scales: torch.Tensor
    axis: int

    def at(self, place: Place) -> Quantized:
        """The copy of what lies there, as views."""
        *stack, rows, columns = place.shape
        shape = (*stack, rows, columns // BLOCK) if self.axis == ROWWISE else (*stack, rows // BLOCK, columns)
        data = self.data[place.offset : place.end].view(place.shape)
        return Quantized(data, self.scales[place.offset // BLOCK : place.end // BLOCK].view(shape), self.axis)


@dataclass(frozen=True)
class FlatCopies:
    """The quantized copies of a stretch of elements; the one that was not asked for is None."""

    rowwise: FlatCopy | None
    columnwise: FlatCopy | None

    def present(self) -> list[FlatCopy]:
        return [copy for copy in (self.rowwise, self.columnwise) if copy is not None]

    def fill(self, value: torch.Tensor, place: Place) -> None:
        """Quantize a bf16 matrix into its place: read once, both copies written."""
        rowwise = self.rowwise.at(place) if self.rowwise is not None else None
        quantize_into(value, rowwise, self.columnwise.at(place) if self.columnwise is not None else None)

    def views(self, places: Sequence[Place]) -> Views:
        found: list[torch.Tensor | None] = []
        for place in places:
            for copy in (self.rowwise, self.columnwise):
                of_matrix = copy.at(place) if copy is not None else None
                found += [of_matrix.data, of_matrix.scales] if of_matrix is not None else [None, None]
        return tuple(found)


def carve(memory: torch.Tensor, numel: int, copies: Copies) -> FlatCopies:
    """Lay copies of ``numel`` elements out in bytes: payloads first, so that each starts aligned, then scales."""
    made: dict[int, FlatCopy] = {}
    scale = numel // BLOCK
    for i, axis in enumerate([ROWWISE] * copies.rowwise + [COLUMNWISE] * copies.columnwise):
        scales_at = copies.number * numel + i * scale
        payload = memory[i * numel : (i + 1) * numel].view(E4M3)
        made[axis] = FlatCopy(payload, memory[scales_at : scales_at + scale], axis)
    return FlatCopies(made.get(ROWWISE), made.get(COLUMNWISE))


class RestingCopies:
    """Copies of a bucket that a rank holds between steps: both, of everything (staged) or of its shard (direct)."""

    def __init__(self, plan: BucketPlan, rank: int, device: torch.device) -> None:
        layout = plan.layout
        numel = layout.numel if plan.resident else layout.shard_numel
        self.memory = torch.zeros(2 * plan.copy_bytes(numel), dtype=torch.uint8, device=device)
        self.flat = carve(self.memory, numel, Copies.BOTH)
        self.quantized = 0
        """How often the copies were made anew."""
        self.bucket_places = [Place(slot.offset, slot.spec.shape) for slot in layout.slots]
        rows = zip(layout.fragments(rank), layout.slots, strict=True)
        self.shard_places = [
            Place(fragment.offset, (fragment.rows, *slot.spec.shape[1:])) for fragment, slot in rows if fragment.rows
        ]

    def fill_from(self, flat: torch.Tensor, places: Sequence[Place]) -> None:
        """Quantize a flat bf16 buffer, or a master through bf16: never a wider value, so that all ways agree."""
        self.quantized += 1
        for place in places:
            matrix = place.as_matrix
            value = flat[matrix.offset : matrix.end].view(matrix.shape)
            self.flat.fill(value.to(torch.bfloat16), matrix)

    def views(self) -> Views:
        return self.flat.views(self.bucket_places)


@dataclass(frozen=True)
class Transfer:
    """One gather, ready to start: stage, move each pair (to, from), settle; then ``views`` are there."""

    moves: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    views: Callable[[], Views]
    stage: Callable[[], None] | None = None
    settle: Callable[[], None] | None = None
    apart: Callable[[], Views] | None = None
    """The views, copied to memory of their own, where the gathered bucket has to leave its place in the arena."""


def alone(resting: RestingCopies, master: torch.Tensor) -> Transfer:
    """Nothing to gather: this rank owns all of it and quantizes it."""
    return Transfer((), resting.views, stage=lambda: resting.fill_from(master, resting.bucket_places))


def staged(resting: RestingCopies, master: torch.Tensor, staging: torch.Tensor, own: torch.Tensor) -> Transfer:
    """bf16 of every owner's master into ``staging`` (``own`` is this rank's part of it), then quantized.

    Writing the own part, gathering and quantizing are one thing that the schedule starts as a whole: there is no moment
    between them at which a gradient could be written to, or cleared in, the memory that staging shares.
    """

    def stage() -> None:
        own.copy_(master)

    def settle() -> None:
        resting.fill_from(staging, resting.bucket_places)
        staging.zero_()  # this bucket's slice and no more: what lies next to it may be another's

    return Transfer(((staging, own),), resting.views, stage, settle)


def direct(
    resting: RestingCopies, master: torch.Tensor, memory: torch.Tensor, numel: int, copies: Copies, stale: bool
) -> Transfer:
    """The owners' copies, as bytes, into ``memory``; an owner whose master changed quantizes first."""
    into = carve(memory, numel, copies)
    own = FlatCopies(
        resting.flat.rowwise if copies.rowwise else None, resting.flat.columnwise if copies.columnwise else None
    )
    moves = []
    for whole, mine in zip(into.present(), own.present(), strict=True):
        moves += [(whole.data.view(torch.uint8), mine.data.view(torch.uint8)), (whole.scales, mine.scales)]
    places = resting.bucket_places
    return Transfer(
        tuple(moves),
        lambda: into.views(places),
        stage=(lambda: resting.fill_from(master, resting.shard_places)) if stale else None,
        apart=lambda: carve(memory.clone(), numel, copies).views(places),
    )
