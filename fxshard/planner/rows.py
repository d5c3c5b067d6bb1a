"""Row layout: parameters one after another, shard boundaries between rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from fxshard.planner.layout import ALIGNMENT, Layout, Slot, TensorSpec, aligned, require_all_placed


def row_layout(specs: Sequence[TensorSpec], ranks: int) -> Layout:
    """Place ``specs`` in order and cut the bucket into ``ranks`` equal shards whose boundaries never cut a row.

    The shard length is the smallest of a short list of candidates at which everything fits. A parameter that crosses
    one boundary is shifted until a row ends there; one that crosses several needs a shard length that its row length
    divides, so multiples of the row lengths are among the candidates.

    >>> layout = row_layout([TensorSpec("w", (6, 64)), TensorSpec("b", (6,))], ranks=2)
    >>> layout.shard_numel, [slot.offset for slot in layout.slots]
    (256, [0, 384])
    """
    for shard_numel in _candidates(specs, ranks):
        offsets = _place(specs, shard_numel, ranks)
        if offsets is not None:
            slots = tuple(Slot(spec, offset) for spec, offset in zip(specs, offsets, strict=True))
            return require_all_placed(specs, Layout(ranks, shard_numel, slots))
    raise AssertionError("unreachable: the last candidate always fits")


def _candidates(specs: Sequence[TensorSpec], ranks: int) -> Iterator[int]:
    """Shard lengths to try, ascending, ending in one that holds any input."""
    least = aligned(-(-sum(aligned(spec.numel) for spec in specs) // ranks))
    steps = {math.lcm(ALIGNMENT, spec.cut_numel) for spec in specs} | {ALIGNMENT}
    long_rows = [spec.cut_numel for spec in specs if spec.numel > least]
    common = math.lcm(ALIGNMENT, *long_rows)
    # Several multiples: the smallest may just fail because the shifts at boundaries add up to more than the slack.
    tried = {aligned(least, step) + i * step for step in steps | {common} for i in range(4)}
    always = _uncut(specs, ranks)
    return iter(sorted(length for length in tried | {always} if length <= always))


def _uncut(specs: Sequence[TensorSpec], ranks: int) -> int:
    """The least shard length at which the parameters fit one after another without any of them being cut."""
    sizes = [aligned(spec.numel) for spec in specs]

    def fits(length: int) -> bool:
        shards, used = 1, 0
        for size in sizes:
            shards, used = (shards, used + size) if used + size <= length else (shards + 1, size)
        return shards <= ranks

    lengths = range(max(sizes, default=0), sum(sizes) + 1, ALIGNMENT)
    return lengths[bisect_left(lengths, True, key=fits)]


def _place(specs: Sequence[TensorSpec], shard_numel: int, ranks: int) -> list[int] | None:
    offsets, cursor = [], 0
    for spec in specs:
        offset = _first_legal_offset(spec, cursor, shard_numel)
        if offset is None or offset + spec.numel > shard_numel * ranks:
            return None
        offsets.append(offset)
        cursor = aligned(offset + spec.numel)
    return offsets


def _first_legal_offset(spec: TensorSpec, cursor: int, shard_numel: int) -> int | None:
    """The first aligned offset at or after ``cursor`` from which ``spec`` crosses boundaries only between rows."""
    if shard_numel == 0:
        return cursor
    boundary = (cursor // shard_numel + 1) * shard_numel
    if cursor + spec.numel <= boundary:
        return cursor
    step = math.lcm(ALIGNMENT, spec.cut_numel)
    shifted = boundary - (boundary - cursor) // step * step  # a row ends exactly at the boundary
    crosses_one = shifted + spec.numel <= boundary + shard_numel
    if crosses_one or shard_numel % spec.cut_numel == 0:
        return shifted
    return None
