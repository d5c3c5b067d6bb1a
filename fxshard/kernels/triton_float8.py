# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""The Triton kernel of ``float8_cast``."""

import triton
import triton.language as tl


@triton.jit
def cast_tile(
    value, scales, plain, turned, rows, columns, row_stride, column_stride,
    SHARE_ROWS: tl.constexpr, SHARE_COLUMNS: tl.constexpr, LARGEST: tl.constexpr, PLAIN: tl.constexpr,
    TURNED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of a row-major matrix through bf16 to float8, as it lies and transposed.

    ``SHARE_ROWS`` rows and ``SHARE_COLUMNS`` columns share a scale; ``row_stride`` and ``column_stride`` are those of
    the scales, 0 where all share it.
    """
    # Tiles one below the other run together: what is written transposed by them lies side by side.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    scale_at = (row // SHARE_ROWS * row_stride)[:, None] + (column // SHARE_COLUMNS * column_stride)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    if WHOLE:
        x = tl.load(value + at)
        scale = tl.load(scales + scale_at)
    else:
        x = tl.load(value + at, mask=inside, other=0.0)
        scale = tl.load(scales + scale_at, mask=inside, other=1.0)
    one_over = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    scaled = x.to(tl.bfloat16).to(tl.float32) * one_over
    # NaN stays NaN: what is no number compares as false.
    limited = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
    payload = limited.to(plain.dtype.element_ty)
    if PLAIN:
        if WHOLE:
            tl.store(plain + at, payload)
        else:
            tl.store(plain + at, payload, mask=inside)
    if TURNED:
        other_way = column.to(tl.int64)[:, None] * rows + row[None, :]
        if WHOLE:
            tl.store(turned + other_way, tl.trans(payload))
        else:
            tl.store(turned + other_way, tl.trans(payload), mask=tl.trans(inside))
