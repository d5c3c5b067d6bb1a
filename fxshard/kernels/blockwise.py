"""Weights in 8 bits or 4-bit NormalFloat, a scale for every block of 64 numbers of a row: the definitions.

``int8``: a block's scale is its largest magnitude / 127, a code is ``round(x / scale)``, a value ``code * scale``.
``nf4``: the scale is the largest magnitude, a code the number of the nearest of sixteen values in [-1, 1] (Dettmers et
al., "QLoRA", 2023), the lower one of two that are equally near; a value is that one times the scale. A byte has two
codes, the first of them in its upper half, as bitsandbytes packs them.
Values are computed in fp32 and rounded once, to the dtype that asks for them.
"""

from __future__ import annotations

from itertools import pairwise

import torch

FORMATS = ("int8", "nf4")
BLOCK = 64
NORMAL_FLOATS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero."""


def quantize(weight: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, fp32 scales) of a matrix whose rows are whole blocks. Blocks of zeros have a scale of zero."""
    rows, columns = weight.shape
    blocks = weight.detach().float().reshape(rows, columns // BLOCK, BLOCK)
    largest = blocks.abs().amax(-1)
    if format == "int8":
        scales = largest / torch.full_like(largest, 127)  # CUDA multiplies by the reciprocal of a number
        codes = (blocks / _divisor(scales)).round_().clamp_(-127, 127).to(torch.int8)
        return codes.view(rows, columns), scales
    between = [(low + high) / 2 for low, high in pairwise(NORMAL_FLOATS)]
    found = torch.bucketize(blocks / _divisor(largest), torch.tensor(between, device=weight.device)).to(torch.uint8)
    pairs = found.view(rows, columns // 2, 2)
    return (pairs[..., 0] << 4) | pairs[..., 1], largest


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1, scales).unsqueeze(-1)


def nf4_pairs(device: torch.device | None = None) -> torch.Tensor:
    """The two values that each byte stands for."""
    values = torch.tensor(NORMAL_FLOATS, device=device)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, pairs: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The matrix that codes and scales stand for. ``pairs``: :func:`nf4_pairs` for nf4, None for int8.

    Operators that Inductor fuses into one kernel, which may run again in backward instead of saving its result.
    """
    values = codes.float() if pairs is None else pairs[codes.int()]
    blocks = values.view(*scales.shape, BLOCK) * scales.unsqueeze(-1)
    return blocks.view(scales.shape[0], -1).to(dtype)
