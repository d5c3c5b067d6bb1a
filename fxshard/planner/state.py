"""How optimizer state is kept: in which format and where, and the bytes that takes, known before any of it exists.

In 8 bits the elements of a moment share a scale by blocks. Blocks are cut out of lines, never across them: lines are a
parameter's last dimension, and shards are cut between rows, so the same blocks exist on any number of ranks.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fxshard._torch.errors import ConfigError
from fxshard.planner.layout import Fragment, aligned, shares

if TYPE_CHECKING:
    from fxshard.planner.bucket_plan import BucketPlan

FORMATS = ("fp32", "bf16", "8bit")
OFFLOADS = ("none", "host")
AUTO = "auto"
"""In place of a format or a place: the planner chooses, so that a memory budget is kept."""
BLOCK = 256
"""Elements that share a scale; the last block of a line may be shorter."""
ROW_MOMENTS = "second_momentum_buffer"
"""The state of NorMuon's that has one number for each row, as its authors call it."""
SHORTEST = 64
"""Elements of the shortest line that is worth scales of its own."""
PIECE_NUMEL = 2**24
"""Elements that are updated together, where their moments come from the host; a row at least."""
PLACES = 3
"""Pieces that are on the device at a time: one comes in, one is updated, one goes out."""
TRAFFIC = 7
"""Passes over a shard in an update. AdamW reads master, gradient and two moments, and writes three of them; Muon has
one moment, but writes and reads what it orthogonalizes. Moments in fewer bits are fewer bytes and more arithmetic: an
update is taken to be as long with them, so that they are chosen for the memory that they free and for nothing else."""
ROW_TRAFFIC = 2
"""More of them with second moments of rows: directions are read for their squares, and multiplied in fp32."""


@dataclass(frozen=True)
class StateChoice:
    """A user's choice for the state of an optimizer."""

    format: str = "fp32"
    offload: str = "none"
    over_replicas: bool = False
    row_moments: bool = False
    """Whether Muon keeps a second moment of every row of a matrix (NorMuon)."""
    most_bytes: int | None = None
    """Bytes that moments may take on the device, where graphs were planned that leave them no more."""

    @property
    def open(self) -> bool:
        """Whether something is left to the planner."""
        return AUTO in (self.format, self.offload)

    @property
    def first(self) -> StateChoice:
        """The choice where memory does not matter: fp32 before fewer bits, the device before the host."""
        return replace(
            self,
            format=FORMATS[0] if self.format == AUTO else self.format,
            offload=OFFLOADS[0] if self.offload == AUTO else self.offload,
        )

    @property
    def plain(self) -> bool:
        """Whether moments have the dtype and the device of the masters."""
        return self.format == "fp32" and self.offload == "none"

    def check_masters(self, name: str, dtype: torch.dtype) -> None:
        """Raise ``ConfigError`` if state cannot be kept so of a parameter that is updated in this dtype."""
        if not self.plain and dtype != torch.float32:
            raise ConfigError(
                f"state={self.format!r}, offload={self.offload!r}: {name} is updated in "
                f"{str(dtype).removeprefix('torch.')}, and state in fewer bits or on the host is for fp32: pass "
                "precision=fxshard.Precision(master=torch.float32, ...), or leave the state as it is"
            )


def line_numel(shape: Sequence[int]) -> int:
    """Elements of a line of a parameter; 0 for what is kept in fp32: vectors, and matrices with short rows.

    >>> line_numel((4096, 1024)), line_numel((8, 4096, 1024)), line_numel((64, 32, 3, 3)), line_numel((4096,))
    (1024, 1024, 288, 0)
    """
    lengths = (shape[-1], math.prod(shape[1:])) if len(shape) > 1 else ()
    return next((length for length in lengths if length >= SHORTEST), 0)


def line_blocks(line: int) -> int:
    """Blocks that a line is cut into."""
    return -(-line // BLOCK)


def value_dtype(format: str, line: int, exact: torch.dtype) -> torch.dtype:
    """The dtype of an element of a moment that is computed with in ``exact``; moments in 8 bits have scales as well."""
    if format == "8bit" and line:
        return torch.uint8
    return torch.bfloat16 if format == "bf16" else exact


def moment_bytes(numel: int, shape: Sequence[int], format: str, exact: torch.dtype = torch.float32) -> int:
    """Bytes of one moment of some rows of a parameter."""
    line = line_numel(shape)
    dtype = value_dtype(format, line, exact)
    scales = numel // line * line_blocks(line) if dtype == torch.uint8 else 0
    return aligned(numel) * dtype.itemsize + 4 * aligned(scales)


def row_numel(numel: int, shape: Sequence[int]) -> int:
    """Rows in that many elements of a matrix, or of a stack of matrices: each has one second moment under NorMuon.

    >>> row_numel(4096 * 1024, (8192, 1024)), row_numel(2 * 4096 * 1024, (8, 4096, 1024))
    (4096, 8192)
    """
    return numel // shape[-1] if numel else 0


def state_shape(field: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor in the state of a parameter of that shape."""
    return (*shape[:-1], 1) if field == ROW_MOMENTS else tuple(shape)


def second_numel(bucket: BucketPlan, fragment: Fragment) -> int:
    """Elements of the second moment of some rows of a parameter."""
    if fragment.name not in bucket.matrices:
        return fragment.numel
    shape = bucket.layout.spec(fragment.name).shape
    return row_numel(fragment.numel, shape) if bucket.row_moments else 0


def update_traffic(bucket: BucketPlan) -> int:
    """Bytes of the device's memory that an update of a bucket reads and writes."""
    passes = TRAFFIC + (ROW_TRAFFIC if bucket.row_moments else 0)
    return passes * bucket.layout.shard_numel * bucket.master_dtype.itemsize


def staging_bytes(bucket: BucketPlan) -> int:
    """The most bytes that an update of a bucket holds on the device of moments that rest on the host.

    AdamW's come in pieces. Muon's come before they are orthogonalized, and are there as fp32 meanwhile.
    """
    if bucket.offload != "host" or not bucket.trainable:
        return 0
    layout, dtype = bucket.layout, bucket.master_dtype
    largest = momentum = 0
    for slot in layout.slots:
        numel, shape = min(slot.spec.numel, layout.shard_numel), slot.spec.shape
        if slot.spec.name in bucket.matrices:
            momentum += numel
            continue
        row = max(slot.spec.row_numel, 1)
        piece = min(numel, max(PIECE_NUMEL // row, 1) * row)
        largest = max(largest, 2 * moment_bytes(piece, shape, bucket.state, dtype))
    return PLACES * largest + min(momentum, layout.shard_numel) * dtype.itemsize


def bytes_of_moments(bucket: BucketPlan) -> int:
    """Bytes of the moments of a bucket that is trained, on the rank that has most of them.

    AdamW has two moments; ``matrices``, which are Muon's, have one, and perhaps one of their rows.
    """
    layout, dtype = bucket.layout, bucket.master_dtype
    cuts = [rank * layout.shard_numel for rank in range(layout.ranks)]
    if bucket.shares_state:
        parts = [shares(layout, rank, bucket.domain.replicas, bucket.matrices) for rank in range(layout.ranks)]
        cuts = [start + begin for start, of_rank in zip(cuts, parts, strict=True) for begin, _ in of_rank]
    cuts.append(layout.numel)
    slots = tuple(
        (slot.offset, slot.end, tuple(slot.spec.shape), 1 if slot.spec.name in bucket.matrices else 2)
        for slot in layout.slots
    )
    return _most_moments(tuple(cuts), slots, bucket.state, dtype, bucket.row_moments)


@functools.cache  # layers are alike
def _most_moments(
    cuts: tuple[int, ...],
    slots: tuple[tuple[int, int, tuple[int, ...], int], ...],
    state: str,
    dtype: torch.dtype,
    row_moments: bool,
) -> int:
    """``slots``: begin, end, shape and number of moments of each parameter; ``cuts``: where ranks' parts begin."""
    totals = [0] * (len(cuts) - 1)
    for offset, end, shape, moments in slots:
        part = max(bisect_right(cuts, offset) - 1, 0)
        while part < len(totals) and cuts[part] < end:
            numel = max(min(end, cuts[part + 1]) - max(offset, cuts[part]), 0)
            totals[part] += moments * moment_bytes(numel, shape, state, dtype)
            if row_moments and moments == 1:
                totals[part] += dtype.itemsize * aligned(row_numel(numel, shape))
            part += 1
    return max(totals, default=0)
