# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""The grouped product for Hopper in Gluon, the explicit dialect of Triton, plain or with the activation after it.

As in ``fxshard.optim.tiles`` a warp that does nothing but start bulk copies runs ahead of eight warps that
multiply, over tiles of 128 × 256; a persistent program per processor walks the tiles, and a tile is rounded and stored
while the first products of the next one are under way. Of a product that is ``GATED`` a tile is 128 columns of gate
and the same ones of up: both are kept, and the activation of them is computed where they are.

Groups begin and end anywhere, and only the device knows where. Bulk copies see them through ``ragged`` descriptors
(``hopper_products``): what a tile reads after its group is zero, and what it writes there is dropped.
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

FAR = gl.constexpr(2**30)
"""The bound of the row that a ragged descriptor is asked for: groups end there, wherever they begin."""


# -- where tiles lie -------------------------------------------------------------------------------------------------


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _tiles_up_to(offsets, experts, PADDED: gl.constexpr, WARPS: gl.constexpr):
    """For each expert how many tiles of 128 rows it and those before it have. Every warp has all of them."""
    layout: gl.constexpr = gl.BlockedLayout([PADDED // 32], [32], [WARPS], [0])
    number = gl.arange(0, PADDED, layout=layout)
    ends = gl.load(offsets + number, mask=number < experts, other=0)
    begins = gl.load(offsets + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = gl.where(number < experts, (ends - begins + 127) // 128, 0)
    return gl.associative_scan(tiles, 0, _plus)


@gluon.jit
def _tile(index, tiles_up_to, height, across, offsets, experts, BAND: gl.constexpr):
    """(expert, where its rows begin, how many they are, row of the tile counted from there, column of the tile).

    Column by column within bands of rows: what runs together shares its operands in the cache.
    """
    band = index // (BAND * across)
    in_band = gl.maximum(gl.minimum(height - band * BAND, BAND), 1)  # after the last tile there is no row
    rest = index - band * BAND * across
    row = band * BAND + rest % in_band
    column = rest // in_band
    before = tiles_up_to <= row
    row -= gl.max(gl.where(before, tiles_up_to, 0), 0)
    # The tile after the last one, which is asked for and never computed, has no expert.
    expert = gl.minimum(gl.sum(gl.where(before, 1, 0), 0), experts - 1)
    begin = gl.load(offsets + gl.maximum(expert - 1, 0))
    begin = gl.where(expert == 0, 0, begin)
    return expert, begin, gl.load(offsets + expert) - begin, row * 128, column


# -- the warp that copies --------------------------------------------------------------------------------------------


@gluon.jit
def _load(
    a_desc, b_desc, up_desc, more_a_desc, more_b_desc, a_bufs, b_bufs, full, empty, offsets,
    total, height, across, deep, more_deep, b_rows, up_shift,
    GATED: gl.constexpr, ADDED: gl.constexpr, B_T: gl.constexpr, experts, PADDED: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Fill one stage after the other as they become free."""
    tiles_up_to = _tiles_up_to(offsets, experts, PADDED, 1)
    turn = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, begin, size, row, column = _tile(index, tiles_up_to, height, across, offsets, experts, BAND)
        rows_before = expert * b_rows
        for step in range(0, deep, 64):
            _fill(a_desc, b_desc, up_desc, a_bufs, b_bufs, full, empty, turn, begin, size, row, column, rows_before,
                  up_shift, step, GATED, B_T)  # fmt: skip
            turn += 1
        if ADDED:
            for step in range(0, more_deep, 64):
                _fill(more_a_desc, more_b_desc, up_desc, a_bufs, b_bufs, full, empty, turn, begin, size, row, column, 0,
                      up_shift, step, GATED, B_T)  # fmt: skip
                turn += 1


@gluon.jit
def _fill(
    a_desc, b_desc, up_desc, a_bufs, b_bufs, full, empty, turn, begin, size, row, column, rows_before, up_shift, step,
    GATED: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    """Start the copies of a stage: 64 columns of the left operand, and what they are multiplied by."""
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    A_BLOCK: gl.constexpr = a_desc.block_type.shape
    B_BLOCK: gl.constexpr = b_desc.block_type.shape
    B_COPIES: gl.constexpr = 2 if GATED else 1
    stage = turn % STAGES
    mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, a_desc.block_type.nbytes + B_COPIES * b_desc.block_type.nbytes)
    a_buf = a_bufs.index(stage).reshape(A_BLOCK)
    tma.async_copy_global_to_shared(a_desc, [FAR, begin + size, FAR - size + row, step], bar, a_buf)
    if GATED:
        halves = b_bufs._reinterpret(b_desc.dtype, [2 * STAGES] + B_BLOCK, b_desc.layout)
        gate_buf = halves.index(2 * stage)
        up_buf = halves.index(2 * stage + 1)
        if B_T:
            down = rows_before + column * 128
            tma.async_copy_global_to_shared(b_desc, [down, step], bar, gate_buf)
            tma.async_copy_global_to_shared(up_desc, [down + up_shift, step], bar, up_buf)
        else:
            down = rows_before + step
            tma.async_copy_global_to_shared(b_desc, [down, column * 128], bar, gate_buf)
            tma.async_copy_global_to_shared(up_desc, [down, column * 128 + up_shift], bar, up_buf)
    elif B_T:
        tma.async_copy_global_to_shared(b_desc, [rows_before + column * 256, step], bar, b_bufs.index(stage))
    else:
        tma.async_copy_global_to_shared(b_desc, [rows_before + step, column * 256], bar, b_bufs.index(stage))


# -- the warps that multiply -----------------------------------------------------------------------------------------


@gluon.jit
def _activated(g, u, weights, begin, size, row, layout: gl.constexpr, ASM: gl.constexpr, WEIGHTED: gl.constexpr):
    """From the rounded values, as backward will compute it again. Pair by pair, or it would not fit into registers."""
    if WEIGHTED:
        inside = row + gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
        scale = gl.load(weights + begin + inside, mask=inside < size, other=0.0).to(gl.float32)
        scale = gl.expand_dims(scale, 1) + gl.zeros([128, 64], gl.float32, layout)
        h = gl.inline_asm_elementwise(ASM, "=&r,r,r,f,f", [g, u, scale], dtype=gl.bfloat16, is_pure=False, pack=2)
    else:
        h = gl.inline_asm_elementwise(ASM, "=&r,r,r", [g, u], dtype=gl.bfloat16, is_pure=False, pack=2)
    return h


@gluon.jit
def _send(desc, buffer, value, begin, size, row, column):
    """Store a part of a tile: through shared memory, by a bulk copy."""
    BLOCK: gl.constexpr = desc.block_type.shape
    buffer.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [FAR, begin + size, FAR - size + row, column], buffer.reshape(BLOCK))


@gluon.jit
def _emit(
    PIECE: gl.constexpr, p0, p1, p2, p3, out_desc, second_desc, hidden_desc, buffers, weights, begin, size, row, column,
    GATED: gl.constexpr, layout: gl.constexpr, ASM: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """Store one of the parts, 64 columns wide, of a tile: one of four, or, GATED, twice gate, up, and activation."""
    BUFFERS: gl.constexpr = buffers.type.shape[0]
    buffer = buffers.index(PIECE % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    if GATED:
        half: gl.constexpr = PIECE // 3
        at = column * 128 + half * 64
        gate = p0 if half == 0 else p1
        up = p2 if half == 0 else p3
        if PIECE % 3 == 0:
            _send(out_desc, buffer, gate, begin, size, row, at)
        elif PIECE % 3 == 1:
            _send(second_desc, buffer, up, begin, size, row, at)
        else:
            h = _activated(gate, up, weights, begin, size, row, layout, ASM, WEIGHTED)
            _send(hidden_desc, buffer, h, begin, size, row, at)
    else:
        at = column * 256 + PIECE * 64
        if PIECE == 0:
            _send(out_desc, buffer, p0, begin, size, row, at)
        elif PIECE == 1:
            _send(out_desc, buffer, p1, begin, size, row, at)
        elif PIECE == 2:
            _send(out_desc, buffer, p2, begin, size, row, at)
        else:
            _send(out_desc, buffer, p3, begin, size, row, at)


@gluon.jit
def _multiply(
    out_desc, second_desc, hidden_desc, a_bufs, b_bufs, buffers, full, empty, offsets, weights,
    total, height, across, deep,
    GATED: gl.constexpr, B_T: gl.constexpr, experts, PADDED: gl.constexpr, BAND: gl.constexpr,
    ASM: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """A tile is stored while the first products of the next one are under way: one product for each piece."""
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    PIECES: gl.constexpr = 6 if GATED else 4
    whole: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16])
    part: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16])
    tiles_up_to = _tiles_up_to(offsets, experts, PADDED, 8)
    turn = 0
    p0 = gl.zeros([128, 64], gl.bfloat16, part)
    p1 = gl.zeros([128, 64], gl.bfloat16, part)
    p2 = gl.zeros([128, 64], gl.bfloat16, part)
    p3 = gl.zeros([128, 64], gl.bfloat16, part)
    # Before the first tile there is nothing to store: a group of no rows.
    old_begin, old_size, old_row, old_column = 0, 0, 0, 0
    _, begin, size, row, column = _tile(gl.program_id(0), tiles_up_to, height, across, offsets, experts, BAND)
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        sum = gl.zeros([128, 256], gl.float32, whole)
        sum = multiply_stage(sum, turn, a_bufs, b_bufs, full, False, False, B_T)
        _emit(0, p0, p1, p2, p3, out_desc, second_desc, hidden_desc, buffers, weights, old_begin, old_size, old_row,
              old_column, GATED, part, ASM, WEIGHTED)  # fmt: skip
        for piece in gl.static_range(1, PIECES):
            sum = multiply_stage(sum, turn + piece, a_bufs, b_bufs, full, True, False, B_T)
            _emit(piece, p0, p1, p2, p3, out_desc, second_desc, hidden_desc, buffers, weights, old_begin, old_size,
                  old_row, old_column, GATED, part, ASM, WEIGHTED)  # fmt: skip
            sum = release(sum, turn + piece, empty, STAGES)
        turn += PIECES
        # Where the next tile lies is found out while products are under way, not between two tiles.
        _, new_begin, new_size, new_row, new_column = _tile(
            index + gl.num_programs(0), tiles_up_to, height, across, offsets, experts, BAND
        )
        for _ in range(PIECES * 64, deep, 64):
            sum = multiply_stage(sum, turn, a_bufs, b_bufs, full, True, False, B_T)
            sum = release(sum, turn, empty, STAGES)
            turn += 1
        sum = warpgroup_mma_wait(0, (sum,))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
        p0, p1, p2, p3 = quarters(sum, half, part)
        old_begin, old_size, old_row, old_column = begin, size, row, column
        begin, size, row, column = new_begin, new_size, new_row, new_column
    for piece in gl.static_range(PIECES):
        _emit(piece, p0, p1, p2, p3, out_desc, second_desc, hidden_desc, buffers, weights, old_begin, old_size,
              old_row, old_column, GATED, part, ASM, WEIGHTED)  # fmt: skip
    tma.store_wait(0)


# -- the kernel ------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["experts", "across", "deep", "more_deep", "b_rows", "up_shift"])
def grouped_kernel(
    a_desc, b_desc, up_desc, more_a_desc, more_b_desc, out_desc, second_desc, hidden_desc, offsets, weights,
    experts, across, deep, more_deep, b_rows, up_shift,
    GATED: gl.constexpr, ADDED: gl.constexpr, B_T: gl.constexpr, PADDED: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, ASM: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """out = a·b for the rows of each group; GATED: out, second = a·b, a·up, and what ``ASM`` makes of them. ADDED: of a
    single group, out = a·b + more_a·more_b, whose depth need not be a multiple of a stage's.
    """
    dtype: gl.constexpr = a_desc.dtype
    B_SHAPE: gl.constexpr = [256, 64] if B_T else [64, 256]
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, 128, 64], gl.NVMMASharedLayout.get_default_for([128, 64], dtype))
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + B_SHAPE, gl.NVMMASharedLayout.get_default_for(B_SHAPE, dtype))
    buffers = gl.allocate_shared_memory(dtype, [2, 128, 64], gl.NVMMASharedLayout.get_default_for([128, 64], dtype))
    full, empty = stage_barriers(STAGES)
    height = gl.max(_tiles_up_to(offsets, experts, PADDED, 8), 0)
    total = height * across
    steps = deep // 64 + (more_deep + 63) // 64
    gl.warp_specialize(
        [
            (_multiply, (
                out_desc, second_desc, hidden_desc, a_bufs, b_bufs, buffers, full, empty, offsets, weights,
                total, height, across, steps * 64, GATED, B_T, experts, PADDED, BAND, ASM, WEIGHTED)),
            (_load, (
                a_desc, b_desc, up_desc, more_a_desc, more_b_desc, a_bufs, b_bufs, full, empty, offsets,
                total, height, across, deep, more_deep, b_rows, up_shift, GATED, ADDED, B_T, experts, PADDED, BAND)),
        ],
        [1],
        [40],
    )  # fmt: skip
