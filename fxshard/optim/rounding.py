# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""The start of Newton–Schulz in one pass: matrices rounded to bf16 as they are, and one over their norms in fp32.

The products apply that factor to their sums (``symmetric``), so nothing is divided here, and nothing read twice.

It is written in Gluon because a sum of squares must not depend on where its terms come from. There the layout, and with
it the order of the terms, is what is written; Triton would choose it. For the same reason no product is contracted with
a sum: every operation is rounded by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxshard.optim import elementwise

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    HAS_GLUON = True
except ImportError:  # torch for the CPU comes without Triton
    HAS_GLUON = False

# Elements of a block, each thread has four side by side. Part of the order of a sum: see above.
_BLOCK = 4096
_WARPS = 8


if HAS_GLUON:

    @gluon.jit
    def _pointer(table, row, count, DTYPE: gl.constexpr):
        address = gl.load(table + row * count + gl.program_id(1))
        return gl.multiple_of(address.to(gl.pointer_type(DTYPE), bitcast=False), 16)

    @gluon.jit
    def _round_kernel(table, count, size, parts, out, sums, SOURCE: gl.constexpr, BLOCK: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        where = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
        inside = where < size
        x = gl.load(_pointer(table, 0, count, SOURCE) + where, mask=inside, other=0.0).to(gl.float32)
        gl.store(out + gl.program_id(1).to(gl.int64) * size + where, x.to(gl.bfloat16), mask=inside)
        gl.store(sums + gl.program_id(1) * parts + gl.program_id(0), gl.sum(x * x))

    @gluon.jit
    def _scale_kernel(sums, parts, eps, scales, BLOCK: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        total = gl.zeros([BLOCK], gl.float32, layout)
        for start in range(0, parts, BLOCK):
            where = start + gl.arange(0, BLOCK, layout=layout)
            total += gl.load(sums + gl.program_id(0) * parts + where, mask=where < parts, other=0.0)
        norm = gl.maximum(gl.sqrt_rn(gl.sum(total)), eps)
        # Of a sum that overflowed this is zero, and so will be all products with it.
        gl.store(scales + gl.program_id(0), gl.div_rn(gl.to_tensor(1.0), norm))


def rounded(matrices: Sequence[torch.Tensor], out: torch.Tensor, eps: float) -> torch.Tensor:
    """Round matrices of one size and dtype into the batch ``out``; one over the Frobenius norm of each, in fp32."""
    scales = torch.empty(len(out), dtype=torch.float32, device=out.device)
    start = 0
    for size, (dtype,), table in elementwise.launches(matrices):
        count, parts = table.shape[1], -(-size // _BLOCK)
        sums = torch.empty(count, parts, dtype=torch.float32, device=out.device)
        options: dict[str, Any] = {"num_warps": _WARPS, "enable_fp_fusion": False}
        _round_kernel[(parts, count)](
            table, count, size, parts, out[start:], sums, SOURCE=dtype, BLOCK=_BLOCK, **options
        )
        _scale_kernel[(count,)](sums, parts, eps, scales[start:], BLOCK=1024, **options)
        start += count
    return scales
