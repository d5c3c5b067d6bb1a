"""GPU kernels for Newton–Schulz: products that are symmetric, at half the cost, and the product with the matrix itself.

One kernel (``tiles``) for Hopper. Its tiles depend on the shape alone, never on the size of the batch or on a
measurement: a matrix gives the same bits wherever it is computed. Sides must be multiples of ``TILE``, and two tiles at
least.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fxshard.kernels.launch import processors
from fxshard.optim import tiles
from fxshard.optim.tiles import HAS_GLUON

if HAS_GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE = 128


@cache
def available(device: torch.device) -> bool:
    """Whether the kernel runs on this device: Gluon is there, and the GPU is a Hopper."""
    return HAS_GLUON and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def symmetric_product(
    left: torch.Tensor, right: torch.Tensor, *, tall: bool = False, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """left·rightᵀ (of ``tall`` matrices: leftᵀ·right), which the caller knows to be symmetric: half of it is computed.

    Both are [batch, side, depth], or [batch, depth, side] where tall. With ``scale``, one fp32 number for each matrix
    of the batch, it is the product of both times that number, in fp32.
    """
    side = left.shape[-1] if tall else left.shape[-2]
    return _launch(left, right, side, symmetric=True, a_t=tall, b_t=not tall, scale=scale, factors=2)


def polynomial(matrix: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
    """a·I + b·A + c·A² of symmetric matrices."""
    return _launch(matrix, matrix, matrix.shape[-1], symmetric=True, b_t=True, triple=(a, b, c))


def product(
    factor: torch.Tensor, matrix: torch.Tensor, *, tall: bool = False, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """factor·matrix (of ``tall`` matrices: matrix·factor), with a symmetric ``factor``; times ``scale``, in fp32."""
    if tall:
        return _launch(matrix, factor, matrix.shape[-1], b_t=True, scale=scale)
    return _launch(factor, matrix, matrix.shape[-1], scale=scale)


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    columns: int,
    *,
    symmetric: bool = False,
    a_t: bool = False,
    b_t: bool = False,
    triple: tuple[float, float, float] | None = None,
    scale: torch.Tensor | None = None,
    factors: int = 1,
) -> torch.Tensor:
    batch = a.shape[0]
    depth, rows = (a.shape[1], a.shape[2]) if a_t else (a.shape[2], a.shape[1])
    out = torch.empty(batch, rows, columns, dtype=a.dtype, device=a.device)
    height, across = rows // TILE, -(-columns // 256)
    pairs = height // 2
    count = pairs * (pairs + 1) + height % 2 * (pairs + 1) if symmetric else height * across
    given = a if triple is not None else out
    tiles.kernel[(min(batch * count, processors(a.device)),)](
        _descriptor(a, [64, 128] if a_t else [128, 64]),
        _descriptor(b, [256, 64] if b_t else [64, 256]),
        _descriptor(given, [128, 128]),
        _descriptor(out, [128, 128]),
        out if scale is None else scale,  # not looked at unless SCALED
        batch,
        rows,
        columns,
        a.shape[1],
        b.shape[1],
        depth,
        *(triple or (0.0, 0.0, 0.0)),
        SYMMETRIC=symmetric,
        POLYNOMIAL=triple is not None,
        A_T=a_t,
        B_T=b_t,
        SCALED=0 if scale is None else factors,
        STAGES=4 if triple is None else 3,  # as many as fit next to the buffers for results
        BAND=16,
        num_warps=8,
        maxnreg=168,  # of 384 threads: 24 for those that copy leaves 240 for those that multiply
    )
    return out


def _descriptor(tensor: torch.Tensor, block: list[int]) -> Any:
    """For bulk copies of blocks. A batch is its matrices below each other: their sides are multiples of the blocks."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), block, layout)
