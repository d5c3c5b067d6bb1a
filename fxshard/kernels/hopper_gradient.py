# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""Weight gradients of experts on a Hopper, in Gluon: aᵀ·b over the rows of each group.

Built as ``hopper_kernels`` is; but here the groups are what is summed over. Both operands are tiles of rows, 64 deep,
which the products take transposed from where they lie. A group ends anywhere: what ``ragged`` copies read after it is
zero, in both operands, and adds nothing. A tile of a small group, or of one without rows, takes further steps over
such zeros until the tile before it is stored; so every tile has as many steps at least, and both sides of the barriers,
which count on through all tiles of a program, count the same.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from fxshard.kernels.hopper import multiply_stage, quarters, release, stage_barriers
from fxshard.kernels.hopper_kernels import FAR

PIECES = gl.constexpr(4)
"""A tile is stored in this many parts, each after one of the first steps of the next tile."""


@gluon.jit
def _tile(index, height, across, experts, BAND: gl.constexpr):
    """(expert, row of tiles, column of tiles): column by column within bands of rows, for the cache."""
    tiles = height * across
    expert = index // tiles
    tile = index - expert * tiles
    top = tile // (BAND * across) * BAND
    in_band = gl.minimum(height - top, BAND)
    rest = tile - top * across
    row = top + rest % in_band
    # The tile after the last one, which is asked for and never computed, has no expert.
    return gl.minimum(expert, experts - 1), row, rest // in_band


@gluon.jit
def _group(expert, offsets):
    """(where its rows end, how many they are, how many steps a tile takes)."""
    end = gl.load(offsets + expert)
    begin = gl.load(offsets + gl.maximum(expert - 1, 0))
    size = end - gl.where(expert == 0, 0, begin)
    return end, size, gl.maximum((size + 63) // 64, PIECES)


@gluon.jit
def _load(a_desc, b_desc, a_bufs, b_bufs, full, empty, offsets, total, height, across, experts, BAND: gl.constexpr):
    """The warp that copies: fills one stage after the other as they become free."""
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    A_BLOCK: gl.constexpr = a_desc.block_type.shape
    B_BLOCK: gl.constexpr = b_desc.block_type.shape
    turn = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, column = _tile(index, height, across, experts, BAND)
        end, size, steps = _group(expert, offsets)
        for step in range(steps):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            down = FAR - size + step * 64
            a_buf = a_bufs.index(stage).reshape(A_BLOCK)
            b_buf = b_bufs.index(stage).reshape(B_BLOCK)
            tma.async_copy_global_to_shared(a_desc, [FAR, end, down, row * 128], bar, a_buf)
            tma.async_copy_global_to_shared(b_desc, [FAR, end, down, column * 256], bar, b_buf)
            turn += 1


@gluon.jit
def _send(PIECE: gl.constexpr, p0, p1, p2, p3, out_desc, buffers, expert, row, column):
    """Store one of the parts, 64 columns wide, of a tile: through shared memory, by a bulk copy."""
    BUFFERS: gl.constexpr = buffers.type.shape[0]
    BLOCK: gl.constexpr = out_desc.block_type.shape
    buffer = buffers.index(PIECE % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    if PIECE == 0:
        buffer.store(p0)
    elif PIECE == 1:
        buffer.store(p1)
    elif PIECE == 2:
        buffer.store(p2)
    else:
        buffer.store(p3)
    fence_async_shared()
    at = column * 256 + PIECE * 64
    tma.async_copy_shared_to_global(out_desc, [expert, row * 128, at], buffer.reshape(BLOCK))


@gluon.jit
def _multiply(
    out_desc, a_bufs, b_bufs, buffers, full, empty, offsets, total, height, across, experts, BAND: gl.constexpr
):
    """The warps that multiply. A tile is stored while the first products of the next one are under way."""
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    whole: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16])
    part: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16])
    turn = 0
    p0 = gl.zeros([128, 64], gl.bfloat16, part)
    p1 = gl.zeros([128, 64], gl.bfloat16, part)
    p2 = gl.zeros([128, 64], gl.bfloat16, part)
    p3 = gl.zeros([128, 64], gl.bfloat16, part)
    # Before the first tile there is nothing to store: no expert has this number, and the copy writes nothing.
    old_expert, old_row, old_column = experts, 0, 0
    expert, row, column = _tile(gl.program_id(0), height, across, experts, BAND)
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        sum = gl.zeros([128, 256], gl.float32, whole)
        sum = multiply_stage(sum, turn, a_bufs, b_bufs, full, False, True, False)
        _send(0, p0, p1, p2, p3, out_desc, buffers, old_expert, old_row, old_column)
        for piece in gl.static_range(1, PIECES):
            sum = multiply_stage(sum, turn + piece, a_bufs, b_bufs, full, True, True, False)
            _send(piece, p0, p1, p2, p3, out_desc, buffers, old_expert, old_row, old_column)
            sum = release(sum, turn + piece, empty, STAGES)
        turn += PIECES
        # Where the next tile lies is found out while products are under way, not between two tiles.
        new_expert, new_row, new_column = _tile(index + gl.num_programs(0), height, across, experts, BAND)
        # Looked up here, not carried along: inlining makes what is loaded for the first tile that of all tiles.
        _, _, steps = _group(expert, offsets)
        for _ in range(PIECES, steps):
            sum = multiply_stage(sum, turn, a_bufs, b_bufs, full, True, True, False)
            sum = release(sum, turn, empty, STAGES)
            turn += 1
        sum = warpgroup_mma_wait(0, (sum,))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
        p0, p1, p2, p3 = quarters(sum, half, part)
        old_expert, old_row, old_column = expert, row, column
        expert, row, column = new_expert, new_row, new_column
    for piece in gl.static_range(PIECES):
        _send(piece, p0, p1, p2, p3, out_desc, buffers, old_expert, old_row, old_column)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "height", "across"])
def gradient_kernel(
    a_desc, b_desc, out_desc, offsets, experts, height, across, STAGES: gl.constexpr, BAND: gl.constexpr
):
    """out[expert] = aᵀ·b over the rows of each expert, zero where it has none."""
    dtype: gl.constexpr = a_desc.dtype
    A: gl.constexpr = [64, 128]
    B: gl.constexpr = [64, 256]
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES] + A, gl.NVMMASharedLayout.get_default_for(A, dtype))
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + B, gl.NVMMASharedLayout.get_default_for(B, dtype))
    buffers = gl.allocate_shared_memory(dtype, [2, 128, 64], gl.NVMMASharedLayout.get_default_for([128, 64], dtype))
    full, empty = stage_barriers(STAGES)
    total = experts * height * across
    gl.warp_specialize(
        [
            (_multiply, (
                out_desc, a_bufs, b_bufs, buffers, full, empty, offsets, total, height, across, experts, BAND)),
            (_load, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, offsets, total, height, across, experts, BAND)),
        ],
        [1],
        [40],
    )  # fmt: skip
