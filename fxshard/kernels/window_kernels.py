# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""``window_op`` as Triton kernels: flash attention over the keys that a block of queries can see, and no others.

As in FlashAttention-2: scores are computed block by block and never stored; backward computes them again from the
logarithms of the sums, once for the gradients of keys and values and once for those of queries. What differs is where a
loop begins and ends: at the lowest bound of a block's queries, or at the highest of a block's keys. Blocks that are
seen as a whole, most of them, are not masked, unless keys are hidden by a mask of their own. Tiles are as wide as the
next power of two: a head of 80 or 96 takes the products of one of 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fxshard.kernels.launch import Launches, pointers

LOG2E = 1.4426950408889634


def _blocks(width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Queries and keys of a block: for results and gradients of queries, and for gradients of keys and values.

    On an H200, heads of 128, a window of 1024 in 4096: blocks of 128 with eight warps take 6 to 28 % longer.
    """
    return ((64, 64), (64, 64)) if width <= 128 else ((64, 32), (32, 64))


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    window: int,
    ahead: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the logarithms (to base 2) of the sums of each query."""
    batch, heads, length, width = query.shape
    out = query.new_empty(batch, length, heads, width).transpose(1, 2)
    sums = query.new_empty(batch, heads, length, dtype=torch.float32)
    rows, cols = _blocks(width)[0]
    constants = (heads // key.shape[1], bounds is not None, key_mask is not None, width, rows, cols)
    grid = (triton.cdiv(length, rows), batch * heads, 1)
    tensors = (query, key, value, out, sums, bounds, _bytes(key_mask))
    numbers = (*_strides(query, key, value, out), length, heads, window, ahead, scale * LOG2E)
    _run_forward(grid, tensors, numbers, constants)
    return out, sums


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    bounds: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    window: int,
    ahead: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, length, width = query.shape
    of_query, of_key, of_value = (
        each.new_empty(batch, length, each.shape[1], width).transpose(1, 2) for each in (query, key, value)
    )
    delta = torch.empty_like(sums)
    rows, cols = _blocks(width)[0]
    _run_delta(
        (triton.cdiv(length, rows), batch * heads, 1),
        (out, grad, delta),
        (*_strides(out, grad), length, heads),
        (width, rows),
    )
    constants = (heads // key.shape[1], bounds is not None, key_mask is not None, width)
    scales = (window, ahead, scale * LOG2E, scale)
    tensors = (query, key, value, grad, sums, delta, bounds, _bytes(key_mask))
    strides = _strides(query, key, value, grad)
    _run_query_gradient(
        (triton.cdiv(length, rows), batch * heads, 1),
        (*tensors, of_query),
        (*strides, *_strides(of_query), length, heads, *scales),
        (*constants, rows, cols),
    )
    rows, cols = _blocks(width)[1]
    _run_key_gradients(
        (triton.cdiv(length, cols), batch * key.shape[1], 1),
        (*tensors, of_key, of_value),
        (*strides, *_strides(of_key, of_value), length, key.shape[1], *scales),
        (*constants, rows, cols),
    )
    return of_query, of_key, of_value


def _bytes(key_mask: torch.Tensor | None) -> torch.Tensor | None:
    """[batch, length], 1 for keys that count."""
    return None if key_mask is None else key_mask[:, 0, 0].contiguous().view(torch.uint8)


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


# -- which keys a query sees -----------------------------------------------------------------------------------------


@triton.jit
def _range(bounds, at, length, documents, before, after, DOCUMENTS: tl.constexpr):
    """From ``before`` tokens before each of ``at`` to ``after`` after it, as far as there are such in its document: the
    first, and the one after the last.

    The keys that a query sees, or the queries that see a key. ``documents``: rows of ``bounds`` times their length.
    """
    low = tl.maximum(at - before, 0)
    high = tl.minimum(at + after + 1, length)
    if DOCUMENTS:
        there = at < length
        low = tl.maximum(low, tl.load(bounds + at, mask=there, other=0))
        high = tl.minimum(high, tl.load(bounds + documents + at, mask=there, other=0))
    return low, high


@triton.jit
def _counted(key_mask, cols, length):
    """Which keys the mask of keys lets be seen."""
    return tl.load(key_mask + cols, mask=cols < length, other=0) != 0


@triton.jit
def _ends(low, high, inside, length, STEP: tl.constexpr):
    """For a block, whose ranges begin at ``low`` and end before ``high``: where the first begins, from where to where
    all go on, and where the last ends; the first three in whole steps.
    """
    start = tl.min(tl.where(inside, low, length)) // STEP * STEP
    stop = tl.max(tl.where(inside, high, 0))
    whole = tl.minimum(tl.cdiv(tl.max(tl.where(inside, low, 0)), STEP) * STEP, tl.cdiv(stop, STEP) * STEP)
    rest = tl.maximum(tl.min(tl.where(inside, high, length)) // STEP * STEP, whole)
    return start, whole, rest, stop


@triton.jit
def _there(at, length, WIDTH: tl.constexpr):
    """Which elements of a tile the matrix has."""
    across = tl.arange(0, triton.next_power_of_2(WIDTH))
    there = at[:, None] < length
    if triton.next_power_of_2(WIDTH) != WIDTH:
        there = there & (across[None, :] < WIDTH)
    return across, there


@triton.jit
def _tile(base, at, stride, length, WIDTH: tl.constexpr):
    """Rows ``at`` of a matrix; zeros after its ends."""
    across, there = _there(at, length, WIDTH)
    return tl.load(base + at[:, None].to(tl.int64) * stride + across[None, :], mask=there, other=0.0)


@triton.jit
def _store(base, at, stride, length, tile, WIDTH: tl.constexpr):
    across, there = _there(at, length, WIDTH)
    place = base + at[:, None].to(tl.int64) * stride + across[None, :]
    tl.store(place, tile.to(base.dtype.element_ty), mask=there)


# -- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _attend(
    acc, total, most, tile, key, value, key_mask, skn, svn, low, high, length, scale,
    start, stop,
    MASKED: tl.constexpr, KEY_MASK: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    for first in tl.range(start, stop, COLS):
        cols = first + tl.arange(0, COLS)
        scores = tl.dot(tile, tl.trans(_tile(key, cols, skn, length, WIDTH))) * scale
        if MASKED:  # not -inf: a row may see nothing here, and what it adds is multiplied by 0 later
            seen = (cols[None, :] >= low[:, None]) & (cols[None, :] < high[:, None])
            scores = tl.where(seen, scores, -1.0e30)
        if KEY_MASK:
            scores = tl.where(_counted(key_mask, cols, length)[None, :], scores, -1.0e30)
        larger = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(tile.dtype), _tile(value, cols, svn, length, WIDTH), acc)
        most = larger
    return acc, total, most


@triton.jit
def _forward(
    query, key, value, out, sums, bounds, key_mask,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son,
    length, heads, window, ahead, scale,
    GROUP: tl.constexpr, DOCUMENTS: tl.constexpr, KEY_MASK: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * ROWS
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    rows = begin + tl.arange(0, ROWS)
    key += b * skb + h // GROUP * skh
    value += b * svb + h // GROUP * svh
    tile = _tile(query + b * sqb + h * sqh, rows, sqn, length, WIDTH)
    documents = tl.num_programs(1) // heads * length
    own = bounds + b * length if DOCUMENTS else bounds
    low, high = _range(own, rows, length, documents, window - 1, ahead, DOCUMENTS)
    counted = key_mask + b * length if KEY_MASK else key_mask
    inside = rows < length
    start, whole, rest, stop = _ends(low, high, inside, length, COLS)
    acc = tl.zeros([ROWS, triton.next_power_of_2(WIDTH)], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    most = tl.full([ROWS], -1.0e30, dtype=tl.float32)
    acc, total, most = _attend(
        acc, total, most, tile, key, value, counted, skn, svn, low, high, length, scale,
        start, whole, True, KEY_MASK, WIDTH, COLS,
    )  # fmt: skip
    acc, total, most = _attend(
        acc, total, most, tile, key, value, counted, skn, svn, low, high, length, scale,
        whole, rest, False, KEY_MASK, WIDTH, COLS,
    )  # fmt: skip
    acc, total, most = _attend(
        acc, total, most, tile, key, value, counted, skn, svn, low, high, length, scale,
        rest, stop, True, KEY_MASK, WIDTH, COLS,
    )  # fmt: skip
    logs = most + tl.log2(total)
    result = acc / total[:, None]
    if KEY_MASK:  # a query that sees no key: its result is 0, and so are its weights in backward
        sees = most > -0.5e30
        logs = tl.where(sees, logs, float("inf"))
        result = tl.where(sees[:, None], result, 0.0)
    _store(out + b * sob + h * soh, rows, son, length, result, WIDTH)
    tl.store(sums + (b * heads + h) * length + rows, logs, mask=inside)


# -- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _delta(
    out, grad, delta,
    sob, soh, son, sgb, sgh, sgn,
    length, heads,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = _tile(out + b * sob + h * soh, rows, son, length, WIDTH).to(tl.float32)
    grads = _tile(grad + b * sgb + h * sgh, rows, sgn, length, WIDTH).to(tl.float32)
    tl.store(delta + (b * heads + h) * length + rows, tl.sum(own * grads, 1), mask=rows < length)


@triton.jit
def _of_queries(
    acc, tile, grads, logs, deltas, key, value, key_mask, skn, svn, low, high, length, scale,
    start, stop,
    MASKED: tl.constexpr, KEY_MASK: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    for first in tl.range(start, stop, COLS):
        cols = first + tl.arange(0, COLS)
        keys = _tile(key, cols, skn, length, WIDTH)
        weights = tl.exp2(tl.dot(tile, tl.trans(keys)) * scale - logs[:, None])
        if MASKED:
            seen = (cols[None, :] >= low[:, None]) & (cols[None, :] < high[:, None])
            weights = tl.where(seen, weights, 0.0)
        if KEY_MASK:
            weights = tl.where(_counted(key_mask, cols, length)[None, :], weights, 0.0)
        change = tl.dot(grads, tl.trans(_tile(value, cols, svn, length, WIDTH)))
        acc = tl.dot((weights * (change - deltas[:, None])).to(keys.dtype), keys, acc)
    return acc


@triton.jit
def _query_gradient(
    query, key, value, grad, sums, delta, bounds, key_mask, of_query,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sgb, sgh, sgn, sdb, sdh, sdn,
    length, heads, window, ahead, scale, plain_scale,
    GROUP: tl.constexpr, DOCUMENTS: tl.constexpr, KEY_MASK: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * ROWS
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    rows = begin + tl.arange(0, ROWS)
    inside = rows < length
    key += b * skb + h // GROUP * skh
    value += b * svb + h // GROUP * svh
    tile = _tile(query + b * sqb + h * sqh, rows, sqn, length, WIDTH)
    grads = _tile(grad + b * sgb + h * sgh, rows, sgn, length, WIDTH)
    logs = tl.load(sums + (b * heads + h) * length + rows, mask=inside, other=float("inf"))
    deltas = tl.load(delta + (b * heads + h) * length + rows, mask=inside, other=0.0)
    documents = tl.num_programs(1) // heads * length
    own = bounds + b * length if DOCUMENTS else bounds
    low, high = _range(own, rows, length, documents, window - 1, ahead, DOCUMENTS)
    counted = key_mask + b * length if KEY_MASK else key_mask
    start, whole, rest, stop = _ends(low, high, inside, length, COLS)
    acc = tl.zeros([ROWS, triton.next_power_of_2(WIDTH)], dtype=tl.float32)
    acc = _of_queries(
        acc, tile, grads, logs, deltas, key, value, counted, skn, svn, low, high, length, scale,
        start, whole, True, KEY_MASK, WIDTH, COLS,
    )  # fmt: skip
    acc = _of_queries(
        acc, tile, grads, logs, deltas, key, value, counted, skn, svn, low, high, length, scale,
        whole, rest, False, KEY_MASK, WIDTH, COLS,
    )  # fmt: skip
    acc = _of_queries(
        acc, tile, grads, logs, deltas, key, value, counted, skn, svn, low, high, length, scale,
        rest, stop, True, KEY_MASK, WIDTH, COLS,
    )  # fmt: skip
    _store(of_query + b * sdb + h * sdh, rows, sdn, length, acc * plain_scale, WIDTH)


@triton.jit
def _of_keys(
    of_key, of_value, keys, values, query, grad, sums, delta, sqn, sgn, low, high, length, scale,
    start, stop,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    for first in tl.range(start, stop, ROWS):
        rows = first + tl.arange(0, ROWS)
        tile = _tile(query, rows, sqn, length, WIDTH)
        grads = _tile(grad, rows, sgn, length, WIDTH)
        logs = tl.load(sums + rows, mask=rows < length, other=float("inf"))
        weights = tl.exp2(tl.dot(keys, tl.trans(tile)) * scale - logs[None, :])
        if MASKED:
            seen = (rows[None, :] >= low[:, None]) & (rows[None, :] < high[:, None])
            weights = tl.where(seen, weights, 0.0)
        of_value = tl.dot(weights.to(grads.dtype), grads, of_value)
        change = tl.dot(values, tl.trans(grads))
        deltas = tl.load(delta + rows, mask=rows < length, other=0.0)
        of_key = tl.dot((weights * (change - deltas[None, :])).to(tile.dtype), tile, of_key)
    return of_key, of_value


@triton.jit
def _key_gradients(
    query, key, value, grad, sums, delta, bounds, key_mask, of_key, of_value,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sgb, sgh, sgn, sdkb, sdkh, sdkn, sdvb, sdvh, sdvn,
    length, heads, window, ahead, scale, plain_scale,
    GROUP: tl.constexpr, DOCUMENTS: tl.constexpr, KEY_MASK: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * COLS
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    cols = begin + tl.arange(0, COLS)
    inside = cols < length
    keys = _tile(key + b * skb + h * skh, cols, skn, length, WIDTH)
    values = _tile(value + b * svb + h * svh, cols, svn, length, WIDTH)
    own = bounds + b * length if DOCUMENTS else bounds
    low, high = _range(own, cols, length, tl.num_programs(1) // heads * length, ahead, window - 1, DOCUMENTS)
    start, whole, rest, stop = _ends(low, high, inside, length, ROWS)
    acc_key = tl.zeros([COLS, triton.next_power_of_2(WIDTH)], dtype=tl.float32)
    acc_value = tl.zeros([COLS, triton.next_power_of_2(WIDTH)], dtype=tl.float32)
    for member in range(GROUP):
        head = h * GROUP + member
        queries = query + b * sqb + head * sqh
        grads = grad + b * sgb + head * sgh
        logs = sums + (b * heads * GROUP + head) * length
        deltas = delta + (b * heads * GROUP + head) * length
        acc_key, acc_value = _of_keys(
            acc_key, acc_value, keys, values, queries, grads, logs, deltas, sqn, sgn, low, high, length, scale,
            start, whole, True, WIDTH, ROWS,
        )  # fmt: skip
        acc_key, acc_value = _of_keys(
            acc_key, acc_value, keys, values, queries, grads, logs, deltas, sqn, sgn, low, high, length, scale,
            whole, rest, False, WIDTH, ROWS,
        )  # fmt: skip
        acc_key, acc_value = _of_keys(
            acc_key, acc_value, keys, values, queries, grads, logs, deltas, sqn, sgn, low, high, length, scale,
            rest, stop, True, WIDTH, ROWS,
        )  # fmt: skip
    if KEY_MASK:  # what a key gets is summed for each key by itself
        counted = _counted(key_mask + b * length, cols, length)[:, None]
        acc_key = tl.where(counted, acc_key, 0.0)
        acc_value = tl.where(counted, acc_value, 0.0)
    _store(of_key + b * sdkb + h * sdkh, cols, sdkn, length, acc_key * plain_scale, WIDTH)
    _store(of_value + b * sdvb + h * sdvh, cols, sdvn, length, acc_value, WIDTH)


class _Kernel:
    """The launches of a kernel: more warps for the widest heads, whose sums do not fit into the registers of four."""

    def __init__(self, kernel, **options) -> None:
        self._narrow = Launches(kernel, num_warps=4, **options)
        self._wide = Launches(kernel, num_warps=8, **options)

    def __call__(self, grid, tensors, numbers, constants) -> None:
        launches = self._narrow if tensors[0].shape[-1] <= 128 else self._wide
        key = (numbers, constants, pointers(*tensors), tensors[0].device)
        launches(key, grid, (*tensors, *numbers, *constants))


_run_forward = _Kernel(_forward, num_stages=3)
_run_delta = _Kernel(_delta)
_run_query_gradient = _Kernel(_query_gradient, num_stages=2)
_run_key_gradients = _Kernel(_key_gradients, num_stages=2)
