"""Matrix products of float8 matrices: by the hardware where it can, otherwise with the same values dequantized."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fxshard._torch import private
from fxshard.kernels.float8 import BLOCK, Scaling, dequantize
from fxshard.kernels.mxfp8_products import wide_dtype, wide_product, wide_product_into

CAPABILITY = (8, 9)
"""From here on a GPU multiplies float8 by itself."""
BLOCKS = 9
"""The major compute capability for which cuBLAS has products with scales per block; Blackwell's blocks are others."""
BLOCKS_SINCE = (12, 9)
"""The CUDA whose cuBLAS is the first to have them."""
MULTIPLE = 16
"""Of elements, in the dimension that a scaled product of torch's sums over, and in that of its weights."""
QUAD = 4
"""Scales per block lie in lines of a multiple of 16 bytes."""


@functools.cache
def scaled_products(device: torch.device, scaling: Scaling) -> bool:
    """Whether products go through torch's scaled GEMM."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    if scaling is not Scaling.BLOCK:
        return capability >= CAPABILITY
    built = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return capability[0] == BLOCKS and built >= BLOCKS_SINCE


def path(device: torch.device, scaling: Scaling) -> str:
    """How products are computed on a device, in words."""
    if scaled_products(device, scaling):
        if scaling is Scaling.BLOCK:
            return "torch.nn.functional.scaled_mm, a scale per 1 × 128, of weights per 128 × 128"
        return f"torch._scaled_mm, a scale per {scaling}"
    how = f"dequantize and multiply in {str(wide_dtype(device)).removeprefix('torch.')}"
    if device.type != "cuda":
        return f"{how} ({device.type} has no float8 product)"
    major, minor = torch.cuda.get_device_capability(device)
    needed = "8.9"
    if scaling is Scaling.BLOCK:
        needed = f"{BLOCKS}.0 and CUDA {'.'.join(map(str, BLOCKS_SINCE))} with a scale per block"
    return f"{how} (compute capability {major}.{minor}, CUDA {torch.version.cuda}; float8 products need {needed})"


def multiply(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    """``a · bᵀ``: both operands lie along the dimension that is summed over, as Hopper reads them.

    ``fast``: sums of the hardware are not moved to full float32 registers every few products. With a scale per block
    they are, every 128.
    """
    _check_layout(a, b)
    scaling = shared(a, a_scales, b, b_scales)
    if not scaled_products(a.device, scaling):
        return wide_product(*_dequantized(a, a_scales, b, b_scales), dtype)
    if scaling is Scaling.BLOCK:
        return private.scaled_mm(*block_operands(a, a_scales, b, b_scales), dtype=dtype)[: a.shape[0]]
    left, right, scale_a, scale_b = _operands(a, a_scales, b, b_scales)
    made = dtype if _any_dtype(a.device, scaling) else torch.bfloat16
    product = torch._scaled_mm(left, right, scale_a, scale_b, out_dtype=made, use_fast_accum=fast)
    return product if made == dtype else product.to(dtype)


def multiply_into(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, fast: bool, out: torch.Tensor
) -> None:
    """The same, written where it stays."""
    _check_layout(a, b)
    scaling = shared(a, a_scales, b, b_scales)
    if not scaled_products(a.device, scaling):
        wide_product_into(*_dequantized(a, a_scales, b, b_scales), out)
    elif not _any_dtype(a.device, scaling) or (scaling is Scaling.BLOCK and a.shape[0] % QUAD):
        out.copy_(multiply(a, a_scales, b, b_scales, out.dtype, fast))
    elif scaling is Scaling.BLOCK:
        private.scaled_mm(*block_operands(a, a_scales, b, b_scales), dtype=out.dtype, out=out)
    else:
        left, right, scale_a, scale_b = _operands(a, a_scales, b, b_scales)
        torch._scaled_mm(left, right, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=fast, out=out)


def _any_dtype(device: torch.device, scaling: Scaling) -> bool:
    """Whether a scaled product may be float32: by cuBLAS, which has scales of rows since it has those of blocks. Where
    it has none of them, products with scales of rows are CUTLASS's, and bf16.
    """
    return scaling is not Scaling.ROW or scaled_products(device, Scaling.BLOCK)


def _check_layout(a: torch.Tensor, b: torch.Tensor) -> None:
    """Emulated or not: what a GPU would refuse is not to pass anywhere else."""
    assert a.is_contiguous() and b.is_contiguous(), f"{a.shape} has strides {a.stride()}, {b.shape} has {b.stride()}"


def shared(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor) -> Scaling:
    """What shares a scale in a product. Of 128 that are summed over, blocks of one row are rows."""
    if a_scales.numel() == b_scales.numel() == 1:
        return Scaling.TENSOR
    lines = all(scales.shape in ((1, 1), (each.shape[0], 1)) for each, scales in ((a, a_scales), (b, b_scales)))
    return Scaling.ROW if lines else Scaling.BLOCK


def _operands(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As torch's scaled GEMM takes them: row-major times column-major, and scales of rows contiguous."""
    a, b = (_padded(each, -each.shape[1] % MULTIPLE) for each in (a, b))
    if a_scales.numel() == b_scales.numel() == 1:
        return a, b.t(), a_scales, b_scales
    rows, columns = a_scales.expand(a.shape[0], 1), b_scales.t().expand(1, b.shape[0])
    return a, b.t(), rows.contiguous(), columns.contiguous()


def block_operands(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, F.ScalingType, torch.Tensor, F.ScalingType]:
    """As cuBLAS takes matrices with scales per block: row-major times column-major, each with its scales and what
    shares one. Rows of ``a`` are made a multiple of four.
    """
    a, b = (_padded(each, -each.shape[1] % BLOCK, rows) for each, rows in ((a, -a.shape[0] % QUAD), (b, 0)))
    return (a, b.t(), *_block_scales(a.shape[0], a_scales), *_block_scales(b.shape[0], b_scales))


def _block_scales(rows: int, scales: torch.Tensor) -> tuple[torch.Tensor, F.ScalingType]:
    """Scales of 1 × 128 lie along the rows of their matrix, those of 128 × 128 along what is summed over."""
    each = rows - scales.shape[0] < QUAD
    lines, length = (scales.t(), rows) if each else (scales, scales.shape[1] + -scales.shape[1] % QUAD)
    made = (lines.new_zeros if length > lines.shape[1] else lines.new_empty)((lines.shape[0], length))
    made.narrow(1, 0, lines.shape[1]).copy_(lines)
    return made.t(), F.ScalingType.BlockWise1x128 if each else F.ScalingType.BlockWise128x128


def _padded(data: torch.Tensor, columns: int, rows: int = 0) -> torch.Tensor:
    """With zeros, of which sums are not changed."""
    return F.pad(data.view(torch.uint8), (0, columns, 0, rows)).view(data.dtype) if columns or rows else data


def _dequantized(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = wide_dtype(a.device)
    return dequantize(a, a_scales, dtype), dequantize(b, b_scales, dtype).t()
