"""Casting to float8 on a GPU: one Triton kernel that reads each value once and writes it as it lies and transposed, and
one that transposes what is float8 already.

Triton is imported when a kernel is first needed: a CPU build of torch has none.
"""

from __future__ import annotations

import functools

import torch

from fxshard.kernels.float8 import BLOCK, LARGEST, cast, tile
from fxshard.kernels.launch import Launches, current, pointers
from fxshard.kernels.quantize import runs_on

WARPS = 8
"""Of a tile, which is as large as a block that shares a scale."""


def cast_plain(value: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix in float8, as it lies."""
    out = torch.empty(value.shape, dtype=dtype, device=value.device)
    cast_into(value, scales, plain=out)
    return out


def cast_turned(value: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix in float8, transposed."""
    out = torch.empty(value.shape[::-1], dtype=dtype, device=value.device)
    cast_into(value, scales, turned=out)
    return out


def cast_both(value: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8, as it lies and transposed, read once."""
    plain = torch.empty(value.shape, dtype=dtype, device=value.device)
    turned = torch.empty(value.shape[::-1], dtype=dtype, device=value.device)
    cast_into(value, scales, plain, turned)
    return plain, turned


def transposed(data: torch.Tensor) -> torch.Tensor:
    """A matrix of bytes, transposed."""
    if not runs_on(data.device):
        return data.view(torch.uint8).t().contiguous().view(data.dtype)
    rows, columns = data.shape
    out = torch.empty((columns, rows), dtype=data.dtype, device=data.device)
    constants = (rows % BLOCK == 0 and columns % BLOCK == 0, BLOCK, BLOCK)
    tensors = data.view(torch.uint8), out.view(torch.uint8)
    key = (data.device.index, pointers(*tensors), rows, columns, constants)
    with current(data.device):
        _transposes()(key, (-(-rows // BLOCK), -(-columns // BLOCK), 1), (*tensors, rows, columns, *constants))
    return out


def cast_into(
    value: torch.Tensor,
    scales: torch.Tensor,
    plain: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
) -> None:
    """Cast a matrix, or a stack of them with scales for each, rounded to bf16 first, into memory that is there; what is
    None is not written.
    """
    if runs_on(value.device):
        _launch(value.contiguous(), scales, plain, turned)
        return
    if value.ndim == 3:
        for i, (matrix, own) in enumerate(zip(value, scales, strict=True)):
            cast_into(matrix, own, None if plain is None else plain[i], None if turned is None else turned[i])
        return
    some = plain if plain is not None else turned
    assert some is not None
    made = cast(value.to(torch.bfloat16), scales, some.dtype).view(torch.uint8)  # not all float8 copies run on a CPU
    if plain is not None:
        plain.view(torch.uint8).copy_(made)
    if turned is not None:
        turned.view(torch.uint8).copy_(made.t())


def _launch(value: torch.Tensor, scales: torch.Tensor, plain: torch.Tensor | None, turned: torch.Tensor | None) -> None:
    *stack, rows, columns = value.shape
    if value.numel() == 0:
        return
    some = plain if plain is not None else turned
    assert some is not None
    strides = tuple(scales.stride(dim) if scales.shape[dim] > 1 else 0 for dim in (-2, -1))
    each = tuple(scales.shape[dim] > 1 and tile(scales.shape[dim], value.shape[dim]) == 1 for dim in (-2, -1))
    whole = rows % BLOCK == 0 and columns % BLOCK == 0
    constants = (*each, LARGEST[some.dtype], plain is not None, turned is not None, whole, BLOCK, BLOCK)
    tensors = (value, scales, some if plain is None else plain, some if turned is None else turned)
    numbers = (rows, columns, *strides, scales.stride(0) if stack else 0)
    grid = (-(-rows // BLOCK), -(-columns // BLOCK), *(stack or (1,)))
    key = (value.device.index, pointers(*tensors), numbers, constants)
    with current(value.device):
        _launches()(key, grid, (*tensors, *numbers, *constants))


@functools.cache
def _launches() -> Launches:
    from fxshard.kernels.triton_float8 import cast_tile

    return Launches(cast_tile, num_warps=WARPS)


@functools.cache
def _transposes() -> Launches:
    from fxshard.kernels.triton_float8 import transpose_tile

    return Launches(transpose_tile, num_warps=WARPS)
