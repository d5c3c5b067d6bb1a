# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""Grouped products for Hopper in Gluon, the explicit dialect of Triton, and what surrounds them in the same kernel.

As in ``fxshard.optim.symmetric`` a warp that does nothing but start bulk copies runs ahead of eight warps that
multiply, over tiles of 128 × 256; a persistent program per processor walks the tiles, and a tile is rounded, worked on
and stored while the first products of the next one are under way.

Groups begin and end anywhere, and only the device knows where. Bulk copies see them through ``ragged`` descriptors:
what a tile reads behind its group is zero, and what it writes there goes nowhere.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

PRODUCT = gl.constexpr(0)
"""x·W."""
UP = gl.constexpr(1)
"""x·W for 128 columns of gate and the same ones of up, both kept, and the activation of them."""
DERIVATIVE = gl.constexpr(2)
"""grad·W, which is not kept, and from it and the pre-activations their gradients, and the activation once more."""
WEIGHTS = gl.constexpr(3)
"""aᵀ·b over the rows of each group."""

FAR = gl.constexpr(2**30)
"""The bound of the row that a ragged descriptor is asked for: groups end there, wherever they begin."""


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _tiles_behind(offsets, experts, PADDED: gl.constexpr, WARPS: gl.constexpr):
    """For each expert how many tiles of 128 rows it and those before it have. Every warp has all of them."""
    layout: gl.constexpr = gl.BlockedLayout([PADDED // 32], [32], [WARPS], [0])
    number = gl.arange(0, PADDED, layout=layout)
    ends = gl.load(offsets + number, mask=number < experts, other=0)
    begins = gl.load(offsets + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = gl.where(number < experts, (ends - begins + 127) // 128, 0)
    return gl.associative_scan(tiles, 0, _plus)


@gluon.jit
def _tile(index, behind, height, across, deep, offsets, experts, MODE: gl.constexpr, BAND: gl.constexpr):
    """(expert, where its rows begin, how many they are, row of the tile, column of the tile, depth).

    Column by column within bands of rows: what runs together shares its operands in the cache. Rows count from where
    the group begins. Of ``WEIGHTS`` the rows are those of the result, and ``height`` and ``across`` are of one expert.
    """
    if MODE == WEIGHTS:
        expert = index // (height * across)
        tile = index % (height * across)
    else:
        expert = 0
        tile = index
    band = tile // (BAND * across)
    in_band = gl.minimum(height - band * BAND, BAND)
    rest = tile - band * BAND * across
    row = band * BAND + rest % in_band
    column = rest // in_band
    if MODE != WEIGHTS:
        before = behind <= row
        expert = gl.sum(gl.where(before, 1, 0), 0)
        row -= gl.max(gl.where(before, behind, 0), 0)
    # A tile behind the last one, which is asked for and never computed, has no expert.
    expert = gl.minimum(expert, experts - 1)
    begin = gl.load(offsets + gl.maximum(expert - 1, 0))
    begin = gl.where(expert == 0, 0, begin)
    size = gl.load(offsets + expert) - begin
    if MODE == WEIGHTS:
        # The first steps are unrolled. Behind the end of a group there are zeros.
        deep = gl.maximum((size + 63) // 64 * 64, 256)
    return expert, begin, size, row * 128, column, deep


@gluon.jit
def _load(
    a_desc, b_desc, up_desc, a_bufs, b_bufs, full, empty, offsets, total, height, across, deep, b_rows, up_shift,
    MODE: gl.constexpr, B_T: gl.constexpr, experts, PADDED: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """The warp that copies: fills one stage after the other as they become free."""
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    A_BLOCK: gl.constexpr = a_desc.block_type.shape
    B_BLOCK: gl.constexpr = b_desc.block_type.shape
    B_COPIES: gl.constexpr = 2 if MODE == UP else 1
    behind = _tiles_behind(offsets, experts, PADDED, 1)
    turn = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, begin, size, row, column, depth = _tile(
            index, behind, height, across, deep, offsets, experts, MODE, BAND
        )
        end = begin + size
        first = FAR - size
        for step in range(0, depth, 64):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, a_desc.block_type.nbytes + B_COPIES * b_desc.block_type.nbytes)
            a_buf = a_bufs.index(stage).reshape(A_BLOCK)
            if MODE == WEIGHTS:
                tma.async_copy_global_to_shared(a_desc, [FAR, end, first + step, row], bar, a_buf)
                b_buf = b_bufs.index(stage).reshape(B_BLOCK)
                tma.async_copy_global_to_shared(b_desc, [FAR, end, first + step, column * 256], bar, b_buf)
            else:
                tma.async_copy_global_to_shared(a_desc, [FAR, end, first + row, step], bar, a_buf)
                if MODE == UP:
                    halves = b_bufs._reinterpret(b_desc.dtype, [2 * STAGES] + B_BLOCK, b_desc.layout)
                    gate_buf = halves.index(2 * stage)
                    up_buf = halves.index(2 * stage + 1)
                    if B_T:
                        down = expert * b_rows + column * 128
                        tma.async_copy_global_to_shared(b_desc, [down, step], bar, gate_buf)
                        tma.async_copy_global_to_shared(up_desc, [down + up_shift, step], bar, up_buf)
                    else:
                        down = expert * b_rows + step
                        tma.async_copy_global_to_shared(b_desc, [down, column * 128], bar, gate_buf)
                        tma.async_copy_global_to_shared(up_desc, [down, column * 128 + up_shift], bar, up_buf)
                elif B_T:
                    down = expert * b_rows + column * 256
                    tma.async_copy_global_to_shared(b_desc, [down, step], bar, b_bufs.index(stage))
                else:
                    down = expert * b_rows + step
                    tma.async_copy_global_to_shared(b_desc, [down, column * 256], bar, b_bufs.index(stage))
            turn += 1


@gluon.jit
def _cut(x, WIDTH: gl.constexpr, layout: gl.constexpr):
    """The two halves of the columns. Each thread has some of both already: nothing moves."""
    left, right = x.reshape([128, 2, WIDTH]).permute(0, 2, 1).split()
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _rounded(x):
    """fp32 to bf16, here and now: ``fxshard.optim.symmetric`` says why."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=False, pack=2
    )


@gluon.jit
def _step(total, turn, a_bufs, b_bufs, full, ADD: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr):
    """Queue the product of the next stage, once it is filled."""
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    stage = turn % STAGES
    mbarrier.wait(full.index(stage), turn // STAGES & 1)
    a_buf = a_bufs.index(stage)
    b_buf = b_bufs.index(stage)
    if A_T:
        a_buf = a_buf.permute((1, 0))
    if B_T:
        b_buf = b_buf.permute((1, 0))
    return warpgroup_mma(a_buf, b_buf, total, use_acc=ADD, is_async=True)


@gluon.jit
def _release(total, turn, empty, STAGES: gl.constexpr):
    """All queued products but the last are done: the stage before it may be filled again."""
    total = warpgroup_mma_wait(1, (total,))
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
    return total


@gluon.jit
def _send(desc, buffer, value, begin, size, row, column, MODE: gl.constexpr, expert):
    """Store a part of a tile: through shared memory, by a bulk copy."""
    BLOCK: gl.constexpr = desc.block_type.shape
    buffer.store(value)
    fence_async_shared()
    if MODE == WEIGHTS:
        tma.async_copy_shared_to_global(desc, [expert, row, column], buffer.reshape(BLOCK))
    else:
        tma.async_copy_shared_to_global(desc, [FAR, begin + size, FAR - size + row, column], buffer.reshape(BLOCK))


@gluon.jit
def _activated(g, u, weights, begin, size, row, layout: gl.constexpr,
               ASM: gl.constexpr, WEIGHTED: gl.constexpr):  # fmt: skip
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
def _fetch(gate_desc, up_desc, buffers, given, begin, size, row, column):
    """Start to copy a piece of the pre-activations."""
    BLOCK: gl.constexpr = gate_desc.block_type.shape
    tma.store_wait(0)
    mbarrier.expect(given, 2 * gate_desc.block_type.nbytes)
    coordinates = [FAR, begin + size, FAR - size + row, column]
    tma.async_copy_global_to_shared(gate_desc, coordinates, given, buffers.index(0).reshape(BLOCK))
    tma.async_copy_global_to_shared(up_desc, coordinates, given, buffers.index(1).reshape(BLOCK))


@gluon.jit
def _differentiated(dh, grad_gate, grad_up, hidden, buffers, given, parity, begin, size, row, column,
                    layout: gl.constexpr, ASM: gl.constexpr):  # fmt: skip
    """Back through the activation for a piece whose pre-activations are there: they make room for their gradients."""
    mbarrier.wait(given, parity)
    gate = buffers.index(0).load(layout)
    up = buffers.index(1).load(layout)
    dg, du, h = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,r,r,r", [gate, up, dh], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=False, pack=2
    )
    buffers.index(0).store(dg)
    buffers.index(1).store(du)
    buffers.index(2).store(h)
    fence_async_shared()
    BLOCK: gl.constexpr = hidden.block_type.shape
    coordinates = [FAR, begin + size, FAR - size + row, column]
    tma.async_copy_shared_to_global(grad_gate, coordinates, buffers.index(0).reshape(BLOCK))
    tma.async_copy_shared_to_global(grad_up, coordinates, buffers.index(1).reshape(BLOCK))
    tma.async_copy_shared_to_global(hidden, coordinates, buffers.index(2).reshape(BLOCK))


@gluon.jit
def _rest(total, turn, begin, depth, a_bufs, b_bufs, full, empty, A_T: gl.constexpr, B_T: gl.constexpr):
    """The products of a tile from ``begin`` on, to the last."""
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    for _ in range(begin, depth, 64):
        total = _step(total, turn, a_bufs, b_bufs, full, True, A_T, B_T)
        total = _release(total, turn, empty, STAGES)
        turn += 1
    total = warpgroup_mma_wait(0, (total,))
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
    return total, turn


@gluon.jit
def _emit(PIECE: gl.constexpr, p0, p1, p2, p3, first_desc, second_desc, third_desc, buffers, weights,
          expert, begin, size, row, column, MODE: gl.constexpr, layout: gl.constexpr,
          ASM: gl.constexpr,
          WEIGHTED: gl.constexpr):  # fmt: skip
    """Store one of the parts, 64 columns wide, of a tile: one of four, or, of UP, twice gate, up, and activation."""
    BUFFERS: gl.constexpr = buffers.type.shape[0]
    buffer = buffers.index(PIECE % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    if MODE == UP:
        half: gl.constexpr = PIECE // 3
        at = column * 128 + half * 64
        gate = p0 if half == 0 else p1
        up = p2 if half == 0 else p3
        if PIECE % 3 == 0:
            _send(first_desc, buffer, gate, begin, size, row, at, MODE, expert)
        elif PIECE % 3 == 1:
            _send(second_desc, buffer, up, begin, size, row, at, MODE, expert)
        else:
            h = _activated(gate, up, weights, begin, size, row, layout, ASM, WEIGHTED)
            _send(third_desc, buffer, h, begin, size, row, at, MODE, expert)
    else:
        at = column * 256 + PIECE * 64
        if PIECE == 0:
            _send(first_desc, buffer, p0, begin, size, row, at, MODE, expert)
        elif PIECE == 1:
            _send(first_desc, buffer, p1, begin, size, row, at, MODE, expert)
        elif PIECE == 2:
            _send(first_desc, buffer, p2, begin, size, row, at, MODE, expert)
        else:
            _send(first_desc, buffer, p3, begin, size, row, at, MODE, expert)


@gluon.jit
def _multiply(
    first_desc, second_desc, third_desc, a_bufs, b_bufs, buffers, full, empty, offsets, weights,
    total, height, across, deep,
    MODE: gl.constexpr, B_T: gl.constexpr, experts, PADDED: gl.constexpr, BAND: gl.constexpr,
    ASM: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """The warps that multiply. A tile is stored while the first products of the next one are under way."""
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    PIECES: gl.constexpr = 6 if MODE == UP else 4
    A_T: gl.constexpr = MODE == WEIGHTS
    whole: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16])
    part: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16])
    behind = _tiles_behind(offsets, experts, PADDED, 8)
    turn = 0
    p0 = gl.zeros([128, 64], gl.bfloat16, part)
    p1 = gl.zeros([128, 64], gl.bfloat16, part)
    p2 = gl.zeros([128, 64], gl.bfloat16, part)
    p3 = gl.zeros([128, 64], gl.bfloat16, part)
    # Before the first tile there is nothing to store: a group of no rows, or an expert behind the last.
    old_expert, old_begin, old_size, old_row, old_column = experts, 0, 0, 0, 0
    expert, begin, size, row, column, depth = _tile(
        gl.program_id(0), behind, height, across, deep, offsets, experts, MODE, BAND
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        sum = gl.zeros([128, 256], gl.float32, whole)
        sum = _step(sum, turn, a_bufs, b_bufs, full, False, A_T, B_T)
        _emit(0, p0, p1, p2, p3, first_desc, second_desc, third_desc, buffers, weights, old_expert, old_begin,
              old_size, old_row, old_column, MODE, part, ASM, WEIGHTED)  # fmt: skip
        for piece in gl.static_range(1, PIECES):
            sum = _step(sum, turn + piece, a_bufs, b_bufs, full, True, A_T, B_T)
            _emit(piece, p0, p1, p2, p3, first_desc, second_desc, third_desc, buffers, weights, old_expert, old_begin,
                  old_size, old_row, old_column, MODE, part, ASM, WEIGHTED)  # fmt: skip
            sum = _release(sum, turn + piece, empty, STAGES)
        turn += PIECES
        # Where the next tile lies is found out while products are under way, not between two tiles.
        new_expert, new_begin, new_size, new_row, new_column, new_depth = _tile(
            index + gl.num_programs(0), behind, height, across, deep, offsets, experts, MODE, BAND
        )
        sum, turn = _rest(sum, turn, PIECES * 64, depth, a_bufs, b_bufs, full, empty, A_T, B_T)
        left, right = _cut(sum, 128, half)
        p0, p1 = _cut(left, 64, part)
        p2, p3 = _cut(right, 64, part)
        p0 = _rounded(p0)
        p1 = _rounded(p1)
        p2 = _rounded(p2)
        p3 = _rounded(p3)
        old_expert, old_begin, old_size, old_row, old_column = expert, begin, size, row, column
        expert, begin, size, row, column, depth = new_expert, new_begin, new_size, new_row, new_column, new_depth
    for piece in gl.static_range(PIECES):
        _emit(piece, p0, p1, p2, p3, first_desc, second_desc, third_desc, buffers, weights, old_expert, old_begin,
              old_size, old_row, old_column, MODE, part, ASM, WEIGHTED)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _multiply_and_differentiate(
    first_desc, second_desc, third_desc, gate_desc, up_desc, a_bufs, b_bufs, buffers, full, empty, given, offsets,
    total, height, across, deep,
    B_T: gl.constexpr, experts, PADDED: gl.constexpr, BAND: gl.constexpr, PACE: gl.constexpr,
    ASM: gl.constexpr,
):  # fmt: skip
    """``_multiply`` for DERIVATIVE: eight pieces of 32 columns, each ``PACE`` products after the one before it."""
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    whole: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16])
    part: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 32, 16])
    behind = _tiles_behind(offsets, experts, PADDED, 8)
    turn = 0
    parity = 0
    none = gl.zeros([128, 32], gl.bfloat16, part)
    pieces = (none, none, none, none, none, none, none, none)
    old_begin, old_size, old_row, old_column = 0, 0, 0, 0
    _, begin, size, row, column, depth = _tile(
        gl.program_id(0), behind, height, across, deep, offsets, experts, DERIVATIVE, BAND
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        sum = gl.zeros([128, 256], gl.float32, whole)
        for piece in gl.static_range(8):
            at = old_column * 256 + piece * 32
            for beat in gl.static_range(PACE):
                sum = _step(sum, turn, a_bufs, b_bufs, full, piece + beat > 0, False, B_T)
                if beat == 0:
                    _fetch(gate_desc, up_desc, buffers, given, old_begin, old_size, old_row, at)
                if beat == PACE - 1:
                    _differentiated(pieces[piece], first_desc, second_desc, third_desc, buffers, given, parity,
                                    old_begin, old_size, old_row, at, part, ASM)  # fmt: skip
                    parity ^= 1
                if piece + beat > 0:
                    sum = _release(sum, turn, empty, STAGES)
                turn += 1
        _, new_begin, new_size, new_row, new_column, new_depth = _tile(
            index + gl.num_programs(0), behind, height, across, deep, offsets, experts, DERIVATIVE, BAND
        )
        sum, turn = _rest(sum, turn, 8 * PACE * 64, depth, a_bufs, b_bufs, full, empty, False, B_T)
        left, right = _cut(sum, 128, half)
        q0, q1 = _cut(left, 64, quarter)
        q2, q3 = _cut(right, 64, quarter)
        p0, p1 = _cut(q0, 32, part)
        p2, p3 = _cut(q1, 32, part)
        p4, p5 = _cut(q2, 32, part)
        p6, p7 = _cut(q3, 32, part)
        pieces = (_rounded(p0), _rounded(p1), _rounded(p2), _rounded(p3),
                  _rounded(p4), _rounded(p5), _rounded(p6), _rounded(p7))  # fmt: skip
        old_begin, old_size, old_row, old_column = begin, size, row, column
        begin, size, row, column, depth = new_begin, new_size, new_row, new_column, new_depth
    for piece in gl.static_range(8):
        at = old_column * 256 + piece * 32
        _fetch(gate_desc, up_desc, buffers, given, old_begin, old_size, old_row, at)
        _differentiated(pieces[piece], first_desc, second_desc, third_desc, buffers, given, parity,
                        old_begin, old_size, old_row, at, part, ASM)  # fmt: skip
        parity ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "across", "deep", "b_rows", "up_shift", "result_rows"])
def grouped_kernel(
    a_desc, b_desc, up_desc, first_desc, second_desc, third_desc, gate_desc, offsets, weights,
    experts, across, deep, b_rows, up_shift, result_rows,
    MODE: gl.constexpr, B_T: gl.constexpr, PADDED: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, PACE: gl.constexpr,
    ASM: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """One of the products. Of DERIVATIVE, ``gate_desc`` and ``up_desc`` are the pre-activations."""
    dtype: gl.constexpr = a_desc.dtype
    A_SHAPE: gl.constexpr = [64, 128] if MODE == WEIGHTS else [128, 64]
    B_SHAPE: gl.constexpr = [256, 64] if B_T else [64, 256]
    WIDTH: gl.constexpr = 32 if MODE == DERIVATIVE else 64
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES] + A_SHAPE, gl.NVMMASharedLayout.get_default_for(A_SHAPE, dtype))
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + B_SHAPE, gl.NVMMASharedLayout.get_default_for(B_SHAPE, dtype))
    buffers = gl.allocate_shared_memory(
        dtype, [3 if MODE == DERIVATIVE else 2, 128, WIDTH], gl.NVMMASharedLayout.get_default_for([128, WIDTH], dtype)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(given, count=1)
    if MODE == WEIGHTS:
        height = (result_rows + 127) // 128
        total = experts * height * across
    else:
        height = gl.max(_tiles_behind(offsets, experts, PADDED, 8), 0)
        total = height * across
    if MODE == DERIVATIVE:
        gl.warp_specialize(
            [
                (_multiply_and_differentiate, (
                    first_desc, second_desc, third_desc, gate_desc, up_desc, a_bufs, b_bufs, buffers, full, empty,
                    given, offsets, total, height, across, deep, B_T, experts, PADDED, BAND, PACE,
                    ASM)),
                (_load, (a_desc, b_desc, up_desc, a_bufs, b_bufs, full, empty, offsets, total, height, across, deep,
                         b_rows, up_shift, MODE, B_T, experts, PADDED, BAND)),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    first_desc, second_desc, third_desc, a_bufs, b_bufs, buffers, full, empty, offsets, weights,
                    total, height, across, deep, MODE, B_T, experts, PADDED, BAND,
                    ASM, WEIGHTED)),
                (_load, (a_desc, b_desc, up_desc, a_bufs, b_bufs, full, empty, offsets, total, height, across, deep,
                         b_rows, up_shift, MODE, B_T, experts, PADDED, BAND)),
            ],
            [1],
            [40],
        )  # fmt: skip
