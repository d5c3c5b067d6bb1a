"""The Triton kernel of ``quantize``. Only imported where there is Triton."""

import triton
import triton.language as tl


@triton.jit
def _scale(largest):  # type: ignore[no-untyped-def]
    """(E8M0 scale, reciprocal) of blocks whose largest magnitudes are given: the bits of ``mxfp8.to_e8m0``."""
    ratio = largest * tl.full((), 0x3B124925, tl.int32).to(tl.float32, bitcast=True)
    bits = ratio.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ((exponent != 0) | (mantissa > 0x400000))
    exponent = tl.where(exponent == 0xFF, 0xFE, exponent + up.to(tl.int32))  # infinity; a NaN never gets here
    inverse = tl.where(exponent == 0xFE, 0x00400000, (0xFE - exponent) << 23)
    return exponent.to(tl.uint8), inverse.to(tl.float32, bitcast=True)


@triton.jit
def quantize_tile(  # type: ignore[no-untyped-def]
    value,
    row_data,
    row_scales,
    column_data,
    column_scales,
    rows,
    columns,
    COLUMNS: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """32 rows × COLUMNS values: read once, both copies written."""
    BLOCK: tl.constexpr = 32
    GROUPS: tl.constexpr = COLUMNS // BLOCK
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    if WHOLE:
        x = tl.load(value + at).to(tl.float32)
    else:
        x = tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
    # maxnum: a NaN loses against every number, and a block of NaNs against this zero
    magnitude = tl.maximum(tl.abs(x), 0.0)

    if ROWWISE:
        largest = tl.max(tl.reshape(magnitude, (BLOCK, GROUPS, BLOCK)), axis=2)
        scale, inverse = _scale(largest)
        scaled = tl.reshape(x, (BLOCK, GROUPS, BLOCK)) * inverse[:, :, None]
        payload = tl.reshape(scaled, (BLOCK, COLUMNS)).to(tl.float8e4nv)
        group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
        groups = columns // BLOCK
        scale_at = row.to(tl.int64)[:, None] * groups + group[None, :]
        if WHOLE:
            tl.store(row_data + at, payload)
            tl.store(row_scales + scale_at, scale)
        else:
            tl.store(row_data + at, payload, mask=inside)
            tl.store(row_scales + scale_at, scale, mask=(row[:, None] < rows) & (group[None, :] < groups))

    if COLUMNWISE:
        largest = tl.max(magnitude, axis=0)
        scale, inverse = _scale(largest)
        payload = (x * inverse[None, :]).to(tl.float8e4nv)
        scale_at = tl.program_id(1).to(tl.int64) * columns + column
        if WHOLE:
            tl.store(column_data + at, payload)
            tl.store(column_scales + scale_at, scale)
        else:
            tl.store(column_data + at, payload, mask=inside)
            tl.store(column_scales + scale_at, scale, mask=column < columns)
