# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""The kernel behind ``symmetric``: tiles of products of bf16 matrices, on a Hopper.

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
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    HAS_GLUON = True
except ImportError:  # torch for the CPU comes without Triton: ``available`` says so
    HAS_GLUON = False


if HAS_GLUON:

    @gluon.jit
    def _tile(index, total, height, across, SYMMETRIC: gl.constexpr, NARROW: gl.constexpr, BAND: gl.constexpr):
        """(matrix, row of tiles, column of tiles); rows are 128 high, columns 256 wide."""
        if NARROW:
            # Of row 2p the last tile has its right half above the diagonal: half as wide, it comes after all others.
            # Without it rows 2p and 2p + 1 have p and p + 1 tiles, and p² tiles come before them.
            pairs = height // 2
            ends = pairs + height % 2
            wide = pairs * ends
            matrix = index // wide
            tile = index % wide
            pair = gl.sqrt(tile.to(gl.float32)).to(gl.int32)
            pair = gl.where(pair * pair > tile, pair - 1, pair)
            pair = gl.where((pair + 1) * (pair + 1) <= tile, pair + 1, pair)
            rest = tile - pair * pair
            row = gl.where(rest < pair, 2 * pair, 2 * pair + 1)
            column = gl.where(rest < pair, rest, rest - pair)
            end = index - total // (wide + ends) * wide
            matrix = gl.where(end >= 0, end // ends, matrix)
            row = gl.where(end >= 0, 2 * (end % ends), row)
            column = gl.where(end >= 0, end % ends, column)
        elif SYMMETRIC:
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
        a_desc, b_desc, n_desc, a_bufs, b_bufs, full, empty, total, height, across, a_rows, b_rows, depth,
        SYMMETRIC: gl.constexpr, NARROW: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, BAND: gl.constexpr,
    ):  # fmt: skip
        """The warp that copies: fills one stage after the other as they become free."""
        turn = 0
        for index in range(gl.program_id(0), total, gl.num_programs(0)):
            matrix, row, column = _tile(index, total, height, across, SYMMETRIC, NARROW, BAND)
            a_top = matrix * a_rows
            b_top = matrix * b_rows
            if NARROW:
                if row == 2 * column:
                    _fill(a_desc, n_desc, a_bufs, b_bufs, full, empty, turn, a_top, b_top, row, column, depth, A_T, B_T)
                else:
                    _fill(a_desc, b_desc, a_bufs, b_bufs, full, empty, turn, a_top, b_top, row, column, depth, A_T, B_T)
            else:
                _fill(a_desc, b_desc, a_bufs, b_bufs, full, empty, turn, a_top, b_top, row, column, depth, A_T, B_T)
            turn += depth // 64

    @gluon.jit
    def _fill(
        a_desc, b_desc, a_bufs, b_bufs, full, empty, turn, a_top, b_top, row, column, depth,
        A_T: gl.constexpr, B_T: gl.constexpr,
    ):  # fmt: skip
        """Copy what one tile is made of; ``b_desc`` says whether it is a wide or a narrow one."""
        STAGES: gl.constexpr = a_bufs.type.shape[0]
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
                b_buf = b_bufs.index(stage).slice(0, b_desc.block_type.shape[0], dim=0)
                tma.async_copy_global_to_shared(b_desc, [b_top + column * 256, step], bar, b_buf)
            else:
                b_buf = b_bufs.index(stage).slice(0, b_desc.block_type.shape[1], dim=1)
                tma.async_copy_global_to_shared(b_desc, [b_top + step, column * 256], bar, b_buf)
            turn += 1

    @gluon.jit
    def _halves(x, layout: gl.constexpr):
        left, right = x.reshape([128, 2, 128]).permute(0, 2, 1).split()
        return gl.convert_layout(left, layout), gl.convert_layout(right, layout)

    @gluon.jit
    def _rounded(x):
        """fp32 to bf16, here and now.

        Left to itself the compiler converts where the value is stored, and keeps the sums in fp32 until then, in the
        registers that the products of the next tile already write: it would have to wait for each of them.
        """
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=False, pack=2
        )

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
    def _step(
        total, turn, a_bufs, b_bufs, full,
        WIDTH: gl.constexpr, ADD: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
    ):  # fmt: skip
        """Queue the product of the next stage, once it is filled."""
        STAGES: gl.constexpr = a_bufs.type.shape[0]
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        a_buf = a_bufs.index(stage)
        b_buf = b_bufs.index(stage).slice(0, WIDTH, dim=0 if B_T else 1)
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
    def _store(out_desc, epilogue, value, top, row, column, nowhere, PIECE: gl.constexpr, SYMMETRIC: gl.constexpr):
        """Store half a tile at block (row, column), or its mirror image if PIECE is odd. Some of it goes nowhere.

        Beyond the last row, a bulk copy writes nothing. A branch instead would end the overlap with the products.
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
    def _one(
        d_desc, out_desc, a_bufs, b_bufs, epilogue, full, empty, given, scales, left, right, old_top, old_row,
        old_column, nowhere, index, total, height, across, rows, depth, a, b, c, matrix, row, column, turn, parity,
        WIDTH: gl.constexpr, SYMMETRIC: gl.constexpr, NARROW: gl.constexpr, POLYNOMIAL: gl.constexpr,
        A_T: gl.constexpr, B_T: gl.constexpr, SCALED: gl.constexpr, BAND: gl.constexpr,
    ):  # fmt: skip
        """Multiply one tile, and store the halves of the one before while the first products are under way."""
        STAGES: gl.constexpr = a_bufs.type.shape[0]
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[8, 1], instr_shape=[16, WIDTH, 16])
        half: gl.constexpr = left.type.layout
        top = matrix * rows
        sum = gl.zeros([128, WIDTH], gl.float32, layout)
        sum = _step(sum, turn, a_bufs, b_bufs, full, WIDTH, False, A_T, B_T)
        _store(out_desc, epilogue, left, old_top, old_row, 2 * old_column, nowhere, 0, SYMMETRIC)
        sum = _step(sum, turn + 1, a_bufs, b_bufs, full, WIDTH, True, A_T, B_T)
        _store(out_desc, epilogue, left, old_top, old_row, 2 * old_column, nowhere, 1, SYMMETRIC)
        sum = _release(sum, turn + 1, empty, STAGES)
        sum = _step(sum, turn + 2, a_bufs, b_bufs, full, WIDTH, True, A_T, B_T)
        _store(out_desc, epilogue, right, old_top, old_row, 2 * old_column + 1, nowhere, 2, SYMMETRIC)
        sum = _release(sum, turn + 2, empty, STAGES)
        sum = _step(sum, turn + 3, a_bufs, b_bufs, full, WIDTH, True, A_T, B_T)
        _store(out_desc, epilogue, right, old_top, old_row, 2 * old_column + 1, nowhere, 3, SYMMETRIC)
        sum = _release(sum, turn + 3, empty, STAGES)
        if POLYNOMIAL:
            tma.store_wait(0)
            mbarrier.expect(given, 2 * d_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(d_desc, [top + row * 128, column * 256], given, epilogue.index(0))
            tma.async_copy_global_to_shared(d_desc, [top + row * 128, column * 256 + 128], given, epilogue.index(1))
        if SCALED:
            scale = gl.load(scales + matrix)
        turn += 4
        # Where the next tile lies is found out while products are under way, not between two tiles.
        new = _tile(index + gl.num_programs(0), total, height, across, SYMMETRIC, NARROW, BAND)
        for _ in range(256, depth, 64):
            sum = _step(sum, turn, a_bufs, b_bufs, full, WIDTH, True, A_T, B_T)
            sum = _release(sum, turn, empty, STAGES)
            turn += 1
        sum = warpgroup_mma_wait(0, (sum,))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
        if WIDTH == 256:
            new_left, new_right = _halves(sum, half)
        else:
            new_left = gl.convert_layout(sum, half)
        if POLYNOMIAL:
            mbarrier.wait(given, parity)
            new_left = _polynomial(new_left, epilogue.index(0), row, column * 256, a, b, c, half)
            if WIDTH == 256:
                new_right = _polynomial(new_right, epilogue.index(1), row, column * 256 + 128, a, b, c, half)
        if SCALED:
            new_left = _scaled(new_left, scale, SCALED)
            if WIDTH == 256:
                new_right = _scaled(new_right, scale, SCALED)
        left = _rounded(new_left)
        if WIDTH == 256:
            right = _rounded(new_right)
        # Of a narrow tile the right half is above the diagonal, and stored nowhere.
        return left, right, new[0], new[1], new[2]

    @gluon.jit
    def _multiply(
        d_desc, out_desc, a_bufs, b_bufs, epilogue, full, empty, given, scales, total, height, across, rows, depth,
        a, b, c, SYMMETRIC: gl.constexpr, NARROW: gl.constexpr, POLYNOMIAL: gl.constexpr, A_T: gl.constexpr,
        B_T: gl.constexpr, SCALED: gl.constexpr, BAND: gl.constexpr,
    ):  # fmt: skip
        """The warps that multiply. A tile is stored while the first products of the next one are under way."""
        half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16])
        turn = 0
        parity = 0
        nowhere = out_desc.shape[0]
        left = gl.zeros([128, 128], out_desc.dtype, half)
        right = gl.zeros([128, 128], out_desc.dtype, half)
        # Before the first tile there is nothing to store.
        old_top, old_row, old_column = nowhere, 0, 0
        matrix, row, column = _tile(gl.program_id(0), total, height, across, SYMMETRIC, NARROW, BAND)
        for index in range(gl.program_id(0), total, gl.num_programs(0)):
            if NARROW:
                if row == 2 * column:
                    left, right, new_matrix, new_row, new_column = _one(
                        d_desc, out_desc, a_bufs, b_bufs, epilogue, full, empty, given, scales, left, right, old_top,
                        old_row, old_column, nowhere, index, total, height, across, rows, depth, a, b, c, matrix, row,
                        column, turn, parity, 128, SYMMETRIC, NARROW, POLYNOMIAL, A_T, B_T, SCALED, BAND,
                    )  # fmt: skip
                else:
                    left, right, new_matrix, new_row, new_column = _one(
                        d_desc, out_desc, a_bufs, b_bufs, epilogue, full, empty, given, scales, left, right, old_top,
                        old_row, old_column, nowhere, index, total, height, across, rows, depth, a, b, c, matrix, row,
                        column, turn, parity, 256, SYMMETRIC, NARROW, POLYNOMIAL, A_T, B_T, SCALED, BAND,
                    )  # fmt: skip
            else:
                left, right, new_matrix, new_row, new_column = _one(
                    d_desc, out_desc, a_bufs, b_bufs, epilogue, full, empty, given, scales, left, right, old_top,
                    old_row, old_column, nowhere, index, total, height, across, rows, depth, a, b, c, matrix, row,
                    column, turn, parity, 256, SYMMETRIC, NARROW, POLYNOMIAL, A_T, B_T, SCALED, BAND,
                )  # fmt: skip
            turn += depth // 64
            parity ^= 1
            old_top, old_row, old_column = matrix * rows, row, column
            matrix, row, column = new_matrix, new_row, new_column
        for piece in gl.static_range(2):
            _store(out_desc, epilogue, left, old_top, old_row, 2 * old_column, nowhere, piece, SYMMETRIC)
        for piece in gl.static_range(2):
            _store(out_desc, epilogue, right, old_top, old_row, 2 * old_column + 1, nowhere, 2 + piece, SYMMETRIC)
        tma.store_wait(0)

    @gluon.jit
    def kernel(
        a_desc, b_desc, n_desc, d_desc, out_desc, scales, batch, rows, columns, a_rows, b_rows, depth, a, b, c,
        SYMMETRIC: gl.constexpr, POLYNOMIAL: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
        NARROW: gl.constexpr, SCALED: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
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
                             across, rows, depth, a, b, c, SYMMETRIC, NARROW, POLYNOMIAL, A_T, B_T, SCALED, BAND)),
                (_load, (a_desc, b_desc, n_desc, a_bufs, b_bufs, full, empty, total, height, across, a_rows, b_rows,
                         depth, SYMMETRIC, NARROW, A_T, B_T, BAND)),
            ],
            [1],
            [24],
        )  # fmt: skip
