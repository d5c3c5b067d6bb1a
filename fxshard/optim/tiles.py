# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""The kernel that ``symmetric`` launches: tiles of products of bf16 matrices, on a Hopper.

It is written in Gluon, the explicit dialect of Triton: a warp that does nothing but start bulk copies runs ahead of
eight warps that multiply, over tiles of 128 × 256; a persistent program per processor walks the tiles of the whole
batch. Of a symmetric product only tiles that touch the lower triangle are computed, and each is stored twice.
"""

from __future__ import annotations

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma_wait,
    )

    from fxshard.kernels.hopper import halves, multiply_stage, release, rounded

    HAS_GLUON = True
except ImportError:  # torch for the CPU comes without Triton: ``available`` says so
    HAS_GLUON = False


if HAS_GLUON:

    @gluon.jit
    def _tile(index, height, across, SYMMETRIC: gl.constexpr, BAND: gl.constexpr):
        """(matrix, row of tiles, column of tiles); rows are 128 high, columns 256 wide."""
        if SYMMETRIC:
            # Rows 2p and 2p + 1 have p + 1 tiles each that touch the lower triangle; p(p + 1) tiles come before them.
            pairs = height // 2
            tiles = pairs * (pairs + 1) + (height % 2) * (pairs + 1)
            matrix = index // tiles
            tile = index % tiles
            pair = ((gl.sqrt(4.0 * tile.to(gl.float32) + 1.0) - 1.0) * 0.5).to(gl.int32)
            # The square root may be off by one in either direction.
            pair = gl.where(pair * (pair + 1) > tile, pair - 1, pair)
            pair = gl.where((pair + 1) * (pair + 2) <= tile, pair + 1, pair)
            rest = tile - pair * (pair + 1)
            row = 2 * pair + rest // (pair + 1)
            column = rest % (pair + 1)
        else:
            # Column by column within bands of rows: what runs together shares its operands in the cache.
            tiles = height * across
            matrix = index // tiles
            tile = index % tiles
            band = tile // (BAND * across)
            in_band = gl.minimum(height - band * BAND, BAND)
            rest = tile - band * BAND * across
            row = band * BAND + rest % in_band
            column = rest // in_band
        return matrix, row, column

    @gluon.jit
    def _load(
        a_desc, b_desc, a_bufs, b_bufs, full, empty, total, height, across, a_rows, b_rows, depth,
        SYMMETRIC: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, BAND: gl.constexpr,
    ):  # fmt: skip
        """The warp that copies: fills one stage after the other as they become free."""
        STAGES: gl.constexpr = a_bufs.type.shape[0]
        turn = 0
        for index in range(gl.program_id(0), total, gl.num_programs(0)):
            matrix, row, column = _tile(index, height, across, SYMMETRIC, BAND)
            a_top = matrix * a_rows
            b_top = matrix * b_rows
            for step in range(0, depth, 64):
                stage = turn % STAGES
                mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                if A_T:
                    tma.async_copy_global_to_shared(a_desc, [a_top + step, row * 128], bar, a_bufs.index(stage))
                else:
                    tma.async_copy_global_to_shared(a_desc, [a_top + row * 128, step], bar, a_bufs.index(stage))
                if B_T:
                    tma.async_copy_global_to_shared(b_desc, [b_top + column * 256, step], bar, b_bufs.index(stage))
                else:
                    tma.async_copy_global_to_shared(b_desc, [b_top + step, column * 256], bar, b_bufs.index(stage))
                turn += 1

    @gluon.jit
    def _polynomial(product, buffer, row, column, a, b, c, layout: gl.constexpr):
        """a·I + b·A + c·A² on one half tile, in fp32; the half tile of A is in ``buffer``."""
        r = row * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
        s = column + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
        diagonal = gl.where(r[:, None] == s[None, :], a, 0.0)
        return diagonal + b * buffer.load(layout).to(gl.float32) + c * product

    @gluon.jit
    def _scaled(product, scale, TIMES: gl.constexpr):
        """The product times ``scale``, once or twice; nothing where that is zero, whatever the product came to."""
        for _ in gl.static_range(TIMES):
            product = product * scale
        return gl.where(gl.full_like(product, scale) == 0.0, 0.0, product)

    @gluon.jit
    def _store(out_desc, epilogue, value, top, row, column, nowhere, PIECE: gl.constexpr, SYMMETRIC: gl.constexpr):
        """Store half a tile at block (row, column), or its mirror image if PIECE is odd.

        What must not be stored is sent past the last row, where a bulk copy writes nothing. A branch instead would end
        the overlap with the products.
        """
        BUFFERS: gl.constexpr = epilogue.type.shape[0]
        buffer = epilogue.index(PIECE % BUFFERS)
        tma.store_wait(BUFFERS - 1)
        if PIECE % 2 == 0:
            # Below the diagonal, or on it; above, it is another tile's mirror image.
            if SYMMETRIC:
                down = gl.where(column <= row, top + row * 128, nowhere)
            else:
                down = top + row * 128
            buffer.store(value)
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [down, column * 128], buffer)
        elif SYMMETRIC:
            across = gl.where(column < row, top + column * 128, nowhere)
            buffer.permute((1, 0)).store(value)
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [across, row * 128], buffer)

    @gluon.jit
    def _multiply(
        d_desc, out_desc, a_bufs, b_bufs, epilogue, full, empty, given, scales, total, height, across, rows, depth,
        a, b, c, SYMMETRIC: gl.constexpr, POLYNOMIAL: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
        SCALED: gl.constexpr, BAND: gl.constexpr,
    ):  # fmt: skip
        """The warps that multiply. A tile is stored while the first products of the next one are under way."""
        STAGES: gl.constexpr = a_bufs.type.shape[0]
        whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16])
        half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16])
        turn = 0
        parity = 0
        nowhere = out_desc.shape[0]
        left = gl.zeros([128, 128], out_desc.dtype, half)
        right = gl.zeros([128, 128], out_desc.dtype, half)
        # Before the first tile there is nothing to store.
        old_top, old_row, old_column = nowhere, 0, 0
        matrix, row, column = _tile(gl.program_id(0), height, across, SYMMETRIC, BAND)
        for index in range(gl.program_id(0), total, gl.num_programs(0)):
            top = matrix * rows
            sum = gl.zeros([128, 256], gl.float32, whole)
            sum = multiply_stage(sum, turn, a_bufs, b_bufs, full, False, A_T, B_T)
            _store(out_desc, epilogue, left, old_top, old_row, 2 * old_column, nowhere, 0, SYMMETRIC)
            sum = multiply_stage(sum, turn + 1, a_bufs, b_bufs, full, True, A_T, B_T)
            _store(out_desc, epilogue, left, old_top, old_row, 2 * old_column, nowhere, 1, SYMMETRIC)
            sum = release(sum, turn + 1, empty, STAGES)
            sum = multiply_stage(sum, turn + 2, a_bufs, b_bufs, full, True, A_T, B_T)
            _store(out_desc, epilogue, right, old_top, old_row, 2 * old_column + 1, nowhere, 2, SYMMETRIC)
            sum = release(sum, turn + 2, empty, STAGES)
            sum = multiply_stage(sum, turn + 3, a_bufs, b_bufs, full, True, A_T, B_T)
            _store(out_desc, epilogue, right, old_top, old_row, 2 * old_column + 1, nowhere, 3, SYMMETRIC)
            sum = release(sum, turn + 3, empty, STAGES)
            if POLYNOMIAL:
                tma.store_wait(0)
                mbarrier.expect(given, 2 * d_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(d_desc, [top + row * 128, column * 256], given, epilogue.index(0))
                tma.async_copy_global_to_shared(d_desc, [top + row * 128, column * 256 + 128], given, epilogue.index(1))
            if SCALED:
                scale = gl.load(scales + matrix)
            turn += 4
            # Where the next tile lies is found out while products are under way, not between two tiles.
            new_matrix, new_row, new_column = _tile(index + gl.num_programs(0), height, across, SYMMETRIC, BAND)
            for _ in range(256, depth, 64):
                sum = multiply_stage(sum, turn, a_bufs, b_bufs, full, True, A_T, B_T)
                sum = release(sum, turn, empty, STAGES)
                turn += 1
            sum = warpgroup_mma_wait(0, (sum,))
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
            new_left, new_right = halves(sum, 128, half)
            if POLYNOMIAL:
                mbarrier.wait(given, parity)
                parity ^= 1
                new_left = _polynomial(new_left, epilogue.index(0), row, column * 256, a, b, c, half)
                new_right = _polynomial(new_right, epilogue.index(1), row, column * 256 + 128, a, b, c, half)
            if SCALED:
                new_left = _scaled(new_left, scale, SCALED)
                new_right = _scaled(new_right, scale, SCALED)
            left = rounded(new_left)
            right = rounded(new_right)
            old_top, old_row, old_column = top, row, column
            matrix, row, column = new_matrix, new_row, new_column
        for piece in gl.static_range(2):
            _store(out_desc, epilogue, left, old_top, old_row, 2 * old_column, nowhere, piece, SYMMETRIC)
        for piece in gl.static_range(2):
            _store(out_desc, epilogue, right, old_top, old_row, 2 * old_column + 1, nowhere, 2 + piece, SYMMETRIC)
        tma.store_wait(0)

    @gluon.jit
    def kernel(
        a_desc, b_desc, d_desc, out_desc, scales, batch, rows, columns, a_rows, b_rows, depth, a, b, c,
        SYMMETRIC: gl.constexpr, POLYNOMIAL: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
        SCALED: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    ):  # fmt: skip
        dtype: gl.constexpr = a_desc.dtype
        a_bufs = gl.allocate_shared_memory(dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
        b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
        epilogue = gl.allocate_shared_memory(dtype, [2 if POLYNOMIAL else 1, 128, 128], out_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)
            mbarrier.init(empty.index(stage), count=1)
        mbarrier.init(given, count=1)
        height = rows // 128
        across = (columns + 255) // 256
        if SYMMETRIC:
            pairs = height // 2
            total = batch * (pairs * (pairs + 1) + (height % 2) * (pairs + 1))
        else:
            total = batch * height * across
        gl.warp_specialize(
            [
                (_multiply, (d_desc, out_desc, a_bufs, b_bufs, epilogue, full, empty, given, scales, total, height,
                             across, rows, depth, a, b, c, SYMMETRIC, POLYNOMIAL, A_T, B_T, SCALED, BAND)),
                (_load, (a_desc, b_desc, a_bufs, b_bufs, full, empty, total, height, across, a_rows, b_rows,
                         depth, SYMMETRIC, A_T, B_T, BAND)),
            ],
            [1],
            [24],
        )  # fmt: skip
