"""How optimizer state is kept: in which format and where, and the bytes that takes, known before any of it exists.

In 8 bits the elements of a moment share a scale by blocks. Blocks are cut out of lines, never across them: lines are a
parameter's last dimension, and shards are cut between rows, so the same blocks exist on any number of ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from fxshard._torch.errors import ConfigError
from fxshard.plan.layout import Layout, aligned
from fxshard.plan.shares import shares

if TYPE_CHECKING:
    from fxshard.plan.buckets import BucketPlan

FORMATS = ("fp32", "bf16", "8bit")
OFFLOADS = ("none", "host")
BLOCK = 256
"""Elements that share a scale; the last block of a line may be shorter."""
SHORTEST = 64
"""Elements of the shortest line that is worth scales of its own."""


@dataclass(frozen=True)
class StateChoice:
    """What a user chose for the state of an optimizer."""

    format: str = "fp32"
    offload: str = "none"
    over_replicas: bool = False

    @property
    def plain(self) -> bool:
        """Whether moments are flat tensors like the masters, beside them."""
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


def value_bytes(format: str, line: int) -> int:
    """Bytes of one element of a moment, without scales."""
    if format == "8bit" and line:
        return 1
    return 2 if format == "bf16" else 4


def moment_bytes(numel: int, shape: Sequence[int], format: str) -> int:
    """Bytes of one moment of some rows of a parameter."""
    line = line_numel(shape)
    scales = numel // line * line_blocks(line) if format == "8bit" and line else 0
    return aligned(numel) * value_bytes(format, line) + 4 * aligned(scales)


def bytes_of_moments(bucket: BucketPlan) -> int:
    """Bytes of the moments of a bucket that is trained, on the rank that has most of them."""
    layout, size = bucket.layout, bucket.master_dtype.itemsize
    cuts = [rank * layout.shard_numel for rank in range(layout.ranks)]
    if bucket.shares_state:
        parts = [shares(layout, rank, bucket.domain.replicas) for rank in range(layout.ranks)]
        cuts = [start + begin for start, of_rank in zip(cuts, parts, strict=True) for begin, _ in of_rank]
    cuts.append(layout.numel)
    if bucket.packs_state:
        return _most_bytes(layout, bucket.state, bucket.matrices, cuts)
    if bucket.shares_state:
        return 2 * size * max(end - begin for begin, end in pairwise(cuts))
    return size * (layout.shard_numel + max(bucket.second_moment_numel(rank) for rank in range(layout.ranks)))


def _most_bytes(layout: Layout, format: str, matrices: Collection[str], cuts: Sequence[int]) -> int:
    """Bytes of the moments between two neighbouring ``cuts`` of a bucket, where they are most.

    AdamW has two moments, ``matrices``, which are Muon's, have one.
    """
    totals = [0] * (len(cuts) - 1)
    for slot in layout.slots:
        part = max(bisect_right(cuts, slot.offset) - 1, 0)
        while part < len(totals) and cuts[part] < slot.end:
            numel = min(slot.end, cuts[part + 1]) - max(slot.offset, cuts[part])
            moments = 1 if slot.spec.name in matrices else 2
            totals[part] += moments * moment_bytes(max(numel, 0), slot.spec.shape, format)
            part += 1
    return max(totals, default=0)
