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


Flat = dict[int, Quantized]
"""By axis, the quantized copies of a stretch of elements: payload and scales without the shapes of matrices."""


def _at(flat: Flat, axis: int, place: Place) -> Quantized | None:
    """The copy of the matrix at a place, as views; None where that copy was not asked for."""
    if axis not in flat:
        return None
    *stack, rows, columns = place.shape
    shape = (*stack, rows, columns // BLOCK) if axis == ROWWISE else (*stack, rows // BLOCK, columns)
    data = flat[axis].data[place.offset : place.end].view(place.shape)
    return Quantized(data, flat[axis].scales[place.offset // BLOCK : place.end // BLOCK].view(shape), axis)


def _views(flat: Flat, places: Sequence[Place]) -> Views:
    found: list[torch.Tensor | None] = []
    for place in places:
        for axis in (ROWWISE, COLUMNWISE):
            copy = _at(flat, axis, place)
            found += [copy.data, copy.scales] if copy is not None else [None, None]
    return tuple(found)


def carve(memory: torch.Tensor, numel: int, copies: Copies) -> Flat:
    """Lay copies of ``numel`` elements out in bytes: payloads first, so that each starts aligned, then scales."""
    made: Flat = {}
    scale = numel // BLOCK
    for i, axis in enumerate([ROWWISE] * copies.rowwise + [COLUMNWISE] * copies.columnwise):
        scales_at = copies.number * numel + i * scale
        payload = memory[i * numel : (i + 1) * numel].view(E4M3)
        made[axis] = Quantized(payload, memory[scales_at : scales_at + scale], axis)
    return made


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
            both = (_at(self.flat, axis, matrix) for axis in (ROWWISE, COLUMNWISE))
            quantize_into(value.to(torch.bfloat16), *both)  # read once, both copies written

    def views(self) -> Views:
        return _views(self.flat, self.bucket_places)


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
    moves = []
    for axis, whole in into.items():
        mine = resting.flat[axis]
        moves += [(whole.data.view(torch.uint8), mine.data.view(torch.uint8)), (whole.scales, mine.scales)]
    places = resting.bucket_places
    return Transfer(
        tuple(moves),
        lambda: _views(into, places),
        stage=(lambda: resting.fill_from(master, resting.shard_places)) if stale else None,
        apart=lambda: _views(carve(memory.clone(), numel, copies), places),
    )
