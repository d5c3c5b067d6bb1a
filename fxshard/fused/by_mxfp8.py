"""Experts in MXFP8: both operands of every product are quantized along the dimension that is summed over.

Forward and the input gradient sum over columns; a weight gradient sums over the tokens of an expert, in blocks of 32
that must not reach into the next expert, which is why this implementation asks for groups of multiples of 32. Products
are those of dequantized values, on every device: the numbers of MXFP8, not its speed.
"""

from __future__ import annotations

import torch

from fxshard.fused.by_torch import TorchExperts
from fxshard.precision.kernels import quantize_one
from fxshard.precision.mxfp8 import BLOCK, COLUMNWISE, ROWWISE


class MXFP8Experts(TorchExperts):
    """The implementation ``mxfp8``."""

    name = "mxfp8"
    alignment = BLOCK

    def product(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        experts, width, out = weight.shape
        rows = _rounded(weight.mT.reshape(experts * out, width), ROWWISE)
        return super().product(_rounded(x, ROWWISE), rows.view(experts, out, width).mT, offsets)

    def weight_gradient(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return super().weight_gradient(_rounded(a, COLUMNWISE), _rounded(b, COLUMNWISE), offsets)

    def row_sum(self, a: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """A bias's gradient is no product: its terms stay as they are."""
        return TorchExperts().row_sum(a, offsets)


def _rounded(value: torch.Tensor, axis: int) -> torch.Tensor:
    """The values of the quantized matrix, which bf16 holds exactly."""
    return quantize_one(value.contiguous(), axis).dequantize(value.dtype)
