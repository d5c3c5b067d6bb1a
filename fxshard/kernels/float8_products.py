"""Matrix products of float8 matrices: by the hardware where it can, otherwise with the same values dequantized."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fxshard.kernels.float8 import BLOCK, Scaling, dequantize
from fxshard.kernels.mxfp8_products import wide_dtype, wide_product, wide_product_into

CAPABILITY = (8, 9)
"""From here on a GPU multiplies float8 by itself."""
MULTIPLE = 16
"""Of elements, in the dimension that a scaled product of torch's sums over, and in that of its weights."""


@functools.cache
def scaled_products(device: torch.device) -> bool:
    """Whether products with scales per tensor or per row go through torch's scaled GEMM."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def path(device: torch.device, scaling: Scaling) -> str:
    """How products are computed on a device, in words."""
    if scaled_products(device) and scaling is not Scaling.BLOCK:
        return f"torch._scaled_mm, a scale per {scaling}"
    how = f"dequantize and multiply in {str(wide_dtype(device)).removeprefix('torch.')}"
    if device.type != "cuda":
        return f"{how} ({device.type} has no float8 product)"
    if scaling is Scaling.BLOCK and scaled_products(device):
        return f"{how} (torch's product with scales per block of {BLOCK} is not used)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{how} (compute capability {major}.{minor}; float8 products need 8.9)"


def multiply(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    """``a · bᵀ``: both operands lie along the dimension that is summed over, as Hopper reads them.

    ``fast``: sums of the hardware are not moved to full float32 registers every few products.
    """
    _check_layout(a, b)
    if _scaled(a, a_scales, b_scales):
        left, right, scale_a, scale_b = _operands(a, a_scales, b, b_scales)
        by_row = scale_a.numel() > 1 or scale_b.numel() > 1
        made = torch.bfloat16 if by_row else dtype  # torch has rowwise products in bf16 only
        product = torch._scaled_mm(left, right, scale_a, scale_b, out_dtype=made, use_fast_accum=fast)
        return product if made == dtype else product.to(dtype)
    return wide_product(*_dequantized(a, a_scales, b, b_scales), dtype)


def multiply_into(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, fast: bool, out: torch.Tensor
) -> None:
    """The same, written where it stays."""
    _check_layout(a, b)
    if not _scaled(a, a_scales, b_scales):
        wide_product_into(*_dequantized(a, a_scales, b, b_scales), out)
    elif a_scales.numel() > 1 or b_scales.numel() > 1:
        out.copy_(multiply(a, a_scales, b, b_scales, torch.bfloat16, fast))
    else:
        left, right, scale_a, scale_b = _operands(a, a_scales, b, b_scales)
        torch._scaled_mm(left, right, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=fast, out=out)


def _check_layout(a: torch.Tensor, b: torch.Tensor) -> None:
    """Emulated or not: what a GPU would refuse is not to pass anywhere else."""
    assert a.is_contiguous() and b.is_contiguous(), f"{a.shape} has strides {a.stride()}, {b.shape} has {b.stride()}"


def _scaled(a: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor) -> bool:
    return scaled_products(a.device) and a_scales.shape[1] == b_scales.shape[1] == 1


def _operands(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As torch's scaled GEMM takes them: row-major times column-major, and scales of rows contiguous."""
    short = -a.shape[1] % MULTIPLE
    if short:  # of tokens: sums get zeros
        a, b = (F.pad(each.view(torch.uint8), (0, short)).view(each.dtype) for each in (a, b))
    if a_scales.numel() == b_scales.numel() == 1:
        return a, b.t(), a_scales, b_scales
    rows, columns = a_scales.expand(a.shape[0], 1), b_scales.t().expand(1, b.shape[0])
    return a, b.t(), rows.contiguous(), columns.contiguous()


def _dequantized(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = wide_dtype(a.device)
    return dequantize(a, a_scales, dtype), dequantize(b, b_scales, dtype).t()
