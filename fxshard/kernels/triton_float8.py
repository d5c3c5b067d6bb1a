# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""The Triton kernels of ``float8_cast``."""

import triton
import triton.language as tl


@triton.jit
def cast_tile(
    value, scales, plain, turned, rows, columns, row_stride, column_stride, matrix_stride,
    PER_ROW: tl.constexpr, PER_COLUMN: tl.constexpr, LARGEST: tl.constexpr, PLAIN: tl.constexpr,
    TURNED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of a row-major matrix, of one or of a stack of them, through bf16 to float8, as it lies and transposed.

    With a scale ``PER_ROW`` or ``PER_COLUMN`` a tile has a line of scales, otherwise one; the strides are those of the
    scales, 0 where all rows or columns share them.
    """
    matrix = tl.program_id(2).to(tl.int64)
    value += matrix * rows * columns
    plain += matrix * rows * columns
    turned += matrix * rows * columns
    scales += matrix * matrix_stride
    # Tiles one below the other run together: what is written transposed by them lies side by side.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    if WHOLE:
        x = tl.load(value + at)
    else:
        x = tl.load(value + at, mask=inside, other=0.0)
    if PER_ROW:
        line = scales + tl.program_id(1) * column_stride + row * row_stride
        scale = tl.load(line, mask=row < rows, other=1.0)[:, None]
    elif PER_COLUMN:
        line = scales + tl.program_id(0) * row_stride + column * column_stride
        scale = tl.load(line, mask=column < columns, other=1.0)[None, :]
    else:
        scale = tl.load(scales + tl.program_id(0) * row_stride + tl.program_id(1) * column_stride)
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


@triton.jit
def transpose_tile(
    value, turned, rows, columns, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A tile of a row-major matrix of bytes, transposed."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    other_way = column.to(tl.int64)[:, None] * rows + row[None, :]
    if WHOLE:
        tl.store(turned + other_way, tl.trans(tl.load(value + at)))
    else:
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(turned + other_way, tl.trans(tl.load(value + at, mask=inside)), mask=tl.trans(inside))
