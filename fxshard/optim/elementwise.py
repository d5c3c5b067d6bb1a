# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""Momentum and update, each as one pass over memory for many tensors, in Triton.

Tensors of one size share a launch: the kernel finds them through a table of addresses. ``fits`` says whether it can.
Kernels that write state take ``refused``, a number on the device: unless it is zero they leave everything as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from fxshard.optim.device_table import device_table

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    _DTYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
except ImportError:  # torch for the CPU comes without Triton
    HAS_TRITON = False
    _DTYPES = {}

_BLOCK = 4096


def fits(*lists: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take these tensors: fp32 or bf16 on a GPU, contiguous, aligned, addressable with 32 bits."""
    return HAS_TRITON and all(
        tensor.is_cuda
        and tensor.dtype in _DTYPES
        and tensor.is_contiguous()
        and tensor.data_ptr() % 16 == 0
        and tensor.numel() < 2**31 - _BLOCK
        for tensors in lists
        for tensor in tensors
    )


if HAS_TRITON:

    @triton.jit
    def _pointer(table, row, count, DTYPE: tl.constexpr):
        address = tl.load(table + row * count + tl.program_id(1))
        return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)

    @triton.jit
    def _momentum_kernel(
        table, count, size, keep, refused, GRAD: tl.constexpr, STATE: tl.constexpr, NESTEROV: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        if refused is not None and tl.load(refused) != 0:
            return
        where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = where < size
        momentum = _pointer(table, 1, count, STATE)
        g = tl.load(_pointer(table, 0, count, GRAD) + where, mask=inside).to(tl.float32)
        m = tl.load(momentum + where, mask=inside).to(tl.float32)
        m += (1 - keep) * (g - m)
        tl.store(momentum + where, m, mask=inside)
        if NESTEROV:
            tl.store(_pointer(table, 2, count, STATE) + where, m - (m - g) * (1 - keep), mask=inside)

    @triton.jit
    def _update_kernel(
        table, count, size, keep, rate, refused, PARAM: tl.constexpr, DIRECTION: tl.constexpr, BLOCK: tl.constexpr
    ):
        if refused is not None and tl.load(refused) != 0:
            return
        where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = where < size
        param = _pointer(table, 0, count, PARAM)
        p = tl.load(param + where, mask=inside).to(tl.float32)
        d = tl.load(_pointer(table, 1, count, DIRECTION) + where, mask=inside).to(tl.float32)
        tl.store(param + where, p * keep - rate * d, mask=inside)


def momentum_(
    grads: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    momentum: float,
    nesterov: bool,
    refused: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """See ``muon_rule.momentum_``."""
    updates = [torch.empty_like(buffer) if nesterov else buffer for buffer in momenta]
    for size, (grad, state, _), table in launches(grads, momenta, updates):
        count = table.shape[1]
        _momentum_kernel[(triton.cdiv(size, _BLOCK), count)](
            table,
            count,
            size,
            momentum,
            refused,
            GRAD=grad,
            STATE=state,
            NESTEROV=nesterov,
            BLOCK=_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,  # each operation rounded by itself
        )
    return updates


def apply_(
    params: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    lr: float,
    weight_decay: float,
    factors: Sequence[float],
    refused: torch.Tensor | None = None,
) -> None:
    """See ``muon_rule.apply_``."""
    for factor in dict.fromkeys(factors):
        chosen = [i for i, other in enumerate(factors) if other == factor]
        for size, (param, direction), table in launches([params[i] for i in chosen], [directions[i] for i in chosen]):
            count = table.shape[1]
            _update_kernel[(triton.cdiv(size, _BLOCK), count)](
                table,
                count,
                size,
                1 - lr * weight_decay,
                lr * factor,
                refused,
                PARAM=param,
                DIRECTION=direction,
                BLOCK=_BLOCK,
                num_warps=8,
            )


def launches(*columns: Sequence[torch.Tensor]) -> Iterator[tuple[int, tuple[Any, ...], torch.Tensor]]:
    """(size, dtypes, table) of tensors that can share a launch: a row of addresses for each column."""
    groups: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for row in zip(*columns, strict=True):
        if row[0].numel():
            key = (row[0].device, row[0].numel(), *(_DTYPES[tensor.dtype] for tensor in row))
            groups.setdefault(key, []).append(tuple(tensor.data_ptr() for tensor in row))
    for (device, size, *dtypes), members in groups.items():
        yield size, tuple(dtypes), _table(device, tuple(members))


def _table(device: torch.device, members: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Where addresses repeat from step to step, as they do once memory has settled, the table is there already."""
    if torch.cuda.is_current_stream_capturing():  # into memory of the graph's, filled when that runs
        return _sent(device, members)
    # Only work on the stream that the copy is on is certain to come after it.
    return _kept(device, torch.cuda.current_stream(device).cuda_stream, members)


@lru_cache(maxsize=1024)
def _kept(device: torch.device, stream: int, members: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    return _sent(device, members)


def _sent(device: torch.device, members: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    return device_table([list(row) for row in zip(*members, strict=True)], torch.int64, device)
