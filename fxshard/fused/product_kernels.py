# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""The grouped product as a Triton kernel, and how its programs find their tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, COLUMNS, DEPTH = 128, 256, 64
"""A tile of the result, and how much of the summed dimension is multiplied at a time."""
STAGES, WARPS, SWIZZLE = 4, 8, 8


def product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row of ``x`` times the matrix of its expert, ``[experts, in, out]``, either of the last two dense."""
    x = x.contiguous()
    tokens, width = x.shape
    columns, experts = weight.shape[-1], weight.shape[0]
    out = x.new_empty(tokens, columns)
    if out.numel() == 0:
        return out
    transposed = weight.stride(-1) != 1
    _product[(tile_count(tokens, columns, experts, ROWS, COLUMNS),)](
        TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
        matrices(weight, transposed, COLUMNS, DEPTH),
        *(offsets.int(), out, width, columns),
        TRANSPOSED=transposed,
        **tile_constants(experts, ROWS, COLUMNS, DEPTH),
    )
    return out


def matrices(weight: torch.Tensor, transposed: bool, columns: int, depth: int) -> TensorDescriptor:
    """All experts' matrices below one another, as they lie in memory."""
    lying = (weight.mT if transposed else weight).contiguous().flatten(0, 1)
    return TensorDescriptor.from_tensor(lying, [columns, depth] if transposed else [depth, columns])


def tile_count(tokens: int, width: int, experts: int, rows: int, columns: int) -> int:
    """How many tiles cover a result of that width. Every expert may leave one half empty."""
    return (triton.cdiv(tokens, rows) + experts) * triton.cdiv(width, columns)


def tile_constants(experts: int, rows: int, columns: int, depth: int) -> dict[str, int]:
    """What kernels are compiled for that find their tiles by ``swizzled`` and ``located``."""
    return {
        "EXPERTS": experts,
        "EXPERTS_PADDED": triton.next_power_of_2(experts),
        "ROWS": rows,
        "COLUMNS": columns,
        "DEPTH": depth,
        "SWIZZLE": SWIZZLE,
        "num_stages": STAGES,
        "num_warps": WARPS,
    }


@triton.jit
def swizzled(program, row_tiles, column_tiles, SWIZZLE: tl.constexpr):
    """(row tile, column tile) of a program, such that neighbours share what they read."""
    band = SWIZZLE * column_tiles
    first = (program // band) * SWIZZLE
    height = tl.minimum(row_tiles - first, SWIZZLE)
    return first + (program % band) % height, (program % band) // height


@triton.jit
def located(offsets, row_tile, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a row tile; read on the device, so the host never waits.

    Tiles are counted expert by expert, each beginning where its expert does. Behind the last the expert is ``EXPERTS``.
    """
    number = tl.arange(0, EXPERTS_PADDED)
    ends = tl.load(offsets + number, mask=number < EXPERTS, other=0)
    begins = tl.load(offsets + number - 1, mask=(number > 0) & (number < EXPERTS), other=0)
    tiles = tl.where(number < EXPERTS, (ends - begins + ROWS - 1) // ROWS, 0)
    behind = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where((behind <= row_tile) & (number < EXPERTS), 1, 0))
    mine = number == expert
    end = tl.sum(tl.where(mine, ends, 0))
    row = tl.sum(tl.where(mine, begins, 0)) + (row_tile - tl.sum(tl.where(mine, behind - tiles, 0))) * ROWS
    return expert, row, end


@triton.jit
def _product(
    x,
    weight,
    offsets,
    out,
    width,
    columns,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    column_tiles = tl.cdiv(columns, COLUMNS)
    row_tile, column_tile = swizzled(tl.program_id(0), tl.num_programs(0) // column_tiles, column_tiles, SWIZZLE)
    expert, row, end = located(offsets, row_tile, EXPERTS, EXPERTS_PADDED, ROWS)
    if expert >= EXPERTS:
        return
    column = column_tile * COLUMNS
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, width, DEPTH):
        a = x.load([row, k])
        if TRANSPOSED:
            b = weight.load([expert * columns + column, k]).T
        else:
            b = weight.load([expert * width + k, column])
        total = tl.dot(a, b, total)
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    n = column + tl.arange(0, COLUMNS)
    inside = (rows < end)[:, None] & (n < columns)[None, :]
    tl.store(out + rows[:, None] * columns + n[None, :], total.to(out.dtype.element_ty), mask=inside)
