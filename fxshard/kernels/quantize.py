"""Quantizing on a GPU: one Triton kernel that reads each value once and writes both copies with their scales.

Triton is imported when a kernel is first needed: a CPU build of torch has none.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fxshard.kernels.mxfp8 import BLOCK, COLUMNWISE, E4M3, ROWWISE, Quantized, quantize
from fxshard.kernels.ops import has_triton

CAPABILITY = (8, 9)
"""From here on a GPU converts to E4M3 by itself."""
COLUMNS = 64
"""That one program of the kernel works on, of 32 rows, where they divide those of the matrix. The fastest of those
that were measured (docs/benchmarks.md)."""


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs there; on other devices the torch version does."""
    return device.type == "cuda" and has_triton() and torch.cuda.get_device_capability(device) >= CAPABILITY


def quantize_both(value: torch.Tensor) -> tuple[Quantized, Quantized]:
    """The rowwise and the columnwise copy of a matrix."""
    if not runs_on(value.device):
        return quantize(value, ROWWISE), quantize(value, COLUMNWISE)
    rowwise, columnwise = empty(value, ROWWISE), empty(value, COLUMNWISE)
    _launch(value, rowwise, columnwise)
    return rowwise, columnwise


def quantize_one(value: torch.Tensor, axis: int) -> Quantized:
    """One copy of a matrix."""
    if not runs_on(value.device):
        return quantize(value, axis)
    copy = empty(value, axis)
    _launch(value, copy if axis == ROWWISE else None, copy if axis == COLUMNWISE else None)
    return copy


def quantize_into(value: torch.Tensor, rowwise: Quantized | None, columnwise: Quantized | None) -> None:
    """Quantize into memory that is there already; a copy that is None is not made."""
    if runs_on(value.device):
        _launch(value, rowwise, columnwise)
        return
    for copy in (rowwise, columnwise):
        if copy is not None:
            made = quantize(value, copy.axis)
            # As bytes: E4M3 tensors of a CPU build cannot all be copied.
            copy.data.view(torch.uint8).copy_(made.data.view(torch.uint8))
            copy.scales.copy_(made.scales)


def empty(value: torch.Tensor, axis: int) -> Quantized:
    """Memory for a copy of ``value``."""
    rows, columns = value.shape
    shape = (rows, columns // BLOCK) if axis == ROWWISE else (-(-rows // BLOCK), columns)
    data = torch.empty((rows, columns), dtype=E4M3, device=value.device)
    return Quantized(data, torch.empty(shape, dtype=torch.uint8, device=value.device), axis)


def _launch(value: torch.Tensor, rowwise: Quantized | None, columnwise: Quantized | None) -> None:
    value = value.contiguous()
    rows, columns = value.shape
    if value.numel() == 0:
        return
    across = min(COLUMNS, columns & -columns)  # the largest power of two that divides
    present = rowwise or columnwise
    assert present is not None
    row, column = rowwise or present, columnwise or present
    grid = (columns // across, -(-rows // BLOCK))
    with torch.cuda.device(value.device):
        _kernel()[grid](
            value,
            row.data,
            row.scales,
            column.data,
            column.scales,
            rows,
            columns,
            COLUMNS=across,
            ROWWISE=rowwise is not None,
            COLUMNWISE=columnwise is not None,
            WHOLE=rows % BLOCK == 0,
            num_warps=1,
        )


@functools.cache
def _kernel() -> Any:
    from fxshard.kernels.triton_quantize import quantize_tile

    return quantize_tile
