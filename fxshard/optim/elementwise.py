# mypy: disable-error-code="no-untyped-def"
# Kernels have no types that Python knows.
"""Momentum, normalisation and update, each as one pass over memory for many tensors, in Triton.

Tensors of one size share a launch: the kernel finds them through a table of addresses. ``fits`` says whether it can.
Kernels that write state take ``refused``, a number on the device: unless it is zero they leave everything as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from fxshard.optim.sending import sent

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    _DTYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
except ImportError:  # torch for the CPU comes without Triton
    HAS_TRITON = False
    _DTYPES = {}

_BLOCK = 4096
_PARTS = 1024
_ROWS, _COLUMNS = 4, 1024


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

    @triton.jit
    def _finite_kernel(table, count, size, bad, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
        where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(_pointer(table, 0, count, DTYPE) + where, mask=where < size, other=0.0).to(tl.float32)
        # Nothing but infinities and NaN differ from themselves after subtraction from themselves.
        if tl.max((x - x != 0.0).to(tl.int32)) > 0:
            tl.store(bad + tl.load(table + count + tl.program_id(1)), 1)

    @triton.jit
    def _squares_kernel(table, count, size, parts, each, sums, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
        source = _pointer(table, 0, count, DTYPE)
        begin = tl.program_id(0) * each
        end = tl.minimum(begin + each, size)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(begin, end, BLOCK):
            where = start + tl.arange(0, BLOCK)
            x = tl.load(source + where, mask=where < end, other=0.0).to(tl.float32)
            total += x * x
        tl.store(sums + tl.program_id(1) * parts + tl.program_id(0), tl.sum(total))

    @triton.jit
    def _normalize_kernel(
        table, count, size, parts, sums, out, eps, DTYPE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
    ):
        part = tl.arange(0, PARTS)
        squares = tl.load(sums + tl.program_id(1) * parts + part, mask=part < parts, other=0.0)
        norm = tl.maximum(tl.sqrt_rn(tl.sum(squares)), eps)
        where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = where < size
        x = tl.load(_pointer(table, 0, count, DTYPE) + where, mask=inside).to(tl.float32)
        tl.store(out + tl.program_id(1).to(tl.int64) * size + where, tl.div_rn(x, norm), mask=inside)

    @triton.jit
    def _row_squares_kernel(
        table, count, rows, columns, out, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):
        source = _pointer(table, 0, count, DTYPE)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK)
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for start in range(0, columns, BLOCK):
            inside = (row[:, None] < rows) & (start + column[None, :] < columns)
            x = tl.load(source + row[:, None] * columns + start + column[None, :], mask=inside, other=0.0)
            x = x.to(tl.float32)
            total += x * x
        tl.store(out + tl.program_id(1) * rows + row, tl.sum(total, axis=1) / columns, mask=row < rows)

    @triton.jit
    def _row_factors_kernel(
        table, count, rows, squares, out, beta2, eps, refused, STATE: tl.constexpr, BLOCK: tl.constexpr
    ):
        """One program for a matrix: rows are few, and both sums are taken in an order of their own."""
        second = _pointer(table, 1, count, STATE)
        squares += tl.program_id(1) * rows
        out += tl.program_id(1) * rows
        before = tl.zeros((BLOCK,), dtype=tl.float32)
        after = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, rows, BLOCK):
            where = start + tl.arange(0, BLOCK)
            s = tl.load(squares + where, mask=where < rows, other=0.0)
            v = tl.load(second + where, mask=where < rows, other=0.0).to(tl.float32)
            factor = 1.0 / (tl.sqrt(v + (1 - beta2) * (s - v)) + eps)
            before += s
            after += s * factor * factor
        ratio = tl.sqrt(tl.sum(before)) / (tl.sqrt(tl.sum(after)) + eps)
        for start in range(0, rows, BLOCK):
            where = start + tl.arange(0, BLOCK)
            s = tl.load(squares + where, mask=where < rows, other=0.0)
            v = tl.load(second + where, mask=where < rows, other=0.0).to(tl.float32)
            moved = v + (1 - beta2) * (s - v)
            tl.store(out + where, ratio / (tl.sqrt(moved) + eps), mask=where < rows)
            if refused is not None:
                moved = tl.where(tl.load(refused) != 0, v, moved)
            tl.store(second + where, moved, mask=where < rows)


def finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """See ``muon_rule.finite``."""
    bad = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    for size, (dtype,), table in launches(tensors):
        count = table.shape[1]
        _finite_kernel[(triton.cdiv(size, _BLOCK), count)](
            table, count, size, bad, DTYPE=dtype, BLOCK=_BLOCK, num_warps=8
        )
    return bad == 0


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
            enable_fp_fusion=False,  # each operation rounded by itself: ``rounding.moved`` gives the same bits
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


def row_factors_(
    matrices: Sequence[torch.Tensor],
    seconds: Sequence[torch.Tensor],
    beta2: float,
    eps: float,
    refused: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """See ``row_moments.row_factors_``: for each [rows, columns], with its [rows, 1] of second moments, [rows, 1].

    Sums are taken in an order that depends on the shape of a matrix alone.
    """
    made: dict[int, torch.Tensor] = {}
    kinds = [(matrix.shape, matrix.dtype, second.dtype) for matrix, second in zip(matrices, seconds, strict=True)]
    for kind in dict.fromkeys(kinds):  # each is one launch
        chosen = [i for i, other in enumerate(kinds) if other == kind]
        rows, columns = kind[0]
        for _, (dtype, state), table in launches([matrices[i] for i in chosen], [seconds[i] for i in chosen]):
            count = table.shape[1]
            squares = torch.empty(count, rows, dtype=torch.float32, device=matrices[0].device)
            out = torch.empty_like(squares)
            _row_squares_kernel[(triton.cdiv(rows, _ROWS), count)](
                table, count, rows, columns, squares, DTYPE=dtype, ROWS=_ROWS, BLOCK=_COLUMNS, num_warps=4
            )
            _row_factors_kernel[(1, count)](
                table, count, rows, squares, out, beta2, eps, refused, STATE=state, BLOCK=_COLUMNS, num_warps=4
            )
            made.update(zip(chosen, out.unsqueeze(-1), strict=True))
    return [made[i] for i in range(len(matrices))]


def normalize(matrices: Sequence[torch.Tensor], out: torch.Tensor, eps: float) -> None:
    """Each matrix divided by its Frobenius norm, into its place in the batch ``out``.

    Sums are taken in an order that depends on the size of a matrix alone, so that equal matrices have equal norms.
    """
    start = 0
    for size, (dtype,), table in launches(matrices):
        count = table.shape[1]
        each = triton.cdiv(triton.cdiv(size, _PARTS), _BLOCK) * _BLOCK
        parts = triton.cdiv(size, each)
        sums = torch.empty(count, parts, dtype=torch.float32, device=out.device)
        _squares_kernel[(parts, count)](table, count, size, parts, each, sums, DTYPE=dtype, BLOCK=_BLOCK, num_warps=8)
        _normalize_kernel[(triton.cdiv(size, _BLOCK), count)](
            table, count, size, parts, sums, out[start:], eps, DTYPE=dtype, PARTS=_PARTS, BLOCK=_BLOCK, num_warps=8
        )
        start += count


def launches(*columns: Sequence[torch.Tensor]) -> Iterator[tuple[int, tuple[Any, ...], torch.Tensor]]:
    """(size, dtypes, table) of tensors that can share a launch: rows of addresses, and one of positions in a column."""
    groups: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for position, row in enumerate(zip(*columns, strict=True)):
        if row[0].numel():
            key = (row[0].device, row[0].numel(), *(_DTYPES[tensor.dtype] for tensor in row))
            groups.setdefault(key, []).append((*(tensor.data_ptr() for tensor in row), position))
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
    return sent([list(row) for row in zip(*members, strict=True)], torch.int64, device)
