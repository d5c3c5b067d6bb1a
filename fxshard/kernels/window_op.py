"""Attention in which each query sees a range of keys that its own is in: a sliding window, its document, or both.

``window`` is how many keys up to its own a query sees at most, ``ahead`` how many after it: none where attention is
causal. ``bounds`` says where documents begin and end, for rows that hold
several: an int32 tensor [2, batch, length], of each token the first of its document and the first of the next one.
``key_mask`` [batch, 1, 1, length] is False for keys that no query sees, those of padding. No mask of queries and keys
exists, and keys outside of the range are not read. A query that sees no key has a result of 0, as in
``scaled_dot_product_attention``. Heads of queries may share heads of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.kernels.ops import define, has_triton

Maybe = torch.Tensor | None
UNLIMITED = 2**30
"""A window that is longer than any sequence, and to which kernels can add a position."""
WIDTHS = range(16, 257, 8)
"""Sizes of a head that the Triton kernels take."""


def _bounds(documents: torch.Tensor) -> torch.Tensor:
    """``documents``: [batch, length], the number of each token's document, which never falls along a row."""
    contiguous = documents.contiguous()
    first = torch.searchsorted(contiguous, contiguous, out_int32=True)
    end = torch.searchsorted(contiguous, contiguous, out_int32=True, right=True)
    return torch.stack((first, end))


document_bounds = define(
    "document_bounds(Tensor documents) -> Tensor",
    _bounds,
    lambda documents: documents.new_empty(2, *documents.shape, dtype=torch.int32),
)


def visible(
    length: int, window: int, ahead: int, bounds: Maybe, device: torch.device, key_mask: Maybe = None
) -> torch.Tensor:
    """The mask that is never made, [batch or 1, 1, length, length]."""
    at = torch.arange(length, device=device)
    seen = ((at[None, :] - at[:, None] <= ahead) & (at[:, None] - at[None, :] < window))[None, None]
    if bounds is not None:
        seen = seen & ((at >= bounds[0][:, :, None]) & (at < bounds[1][:, :, None]))[:, None]
    return seen if key_mask is None else seen & key_mask


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Maybe,
    key_mask: Maybe,
    window: int,
    ahead: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = _rows(query), _rows(key), _rows(value)
    if _by_triton(query):
        from fxshard.kernels.window_kernels import forward  # Triton is not everywhere

        return forward(query, key, value, bounds, key_mask, window, ahead, scale)
    scores = _scores(query, key, bounds, key_mask, window, ahead, scale)
    sums = scores.logsumexp(-1)
    sums = sums.masked_fill(sums == -torch.inf, torch.inf)  # no key is seen: all weights are 0
    weights = (scores - sums.unsqueeze(-1)).exp().to(value.dtype)
    return _laid_out(weights @ _repeated(value, query)), sums


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    bounds: Maybe,
    key_mask: Maybe,
    window: int,
    ahead: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, query, key, value = _rows(grad), _rows(query), _rows(key), _rows(value)
    if _by_triton(query):
        from fxshard.kernels.window_kernels import backward

        return backward(grad, query, key, value, _rows(out), sums, bounds, key_mask, window, ahead, scale)
    scores = _scores(query, key, bounds, key_mask, window, ahead, scale)
    weights = (scores - sums.unsqueeze(-1)).exp()
    delta = (out.to(scores.dtype) * grad.to(scores.dtype)).sum(-1, keepdim=True)
    change = (grad @ _repeated(value, query).mT).to(scores.dtype)
    of_scores = (weights * (change - delta)).to(query.dtype)
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    of_value = (weights.to(grad.dtype).mT @ grad).unflatten(1, groups).sum(2)
    of_key = (of_scores.mT @ query).unflatten(1, groups).sum(2) * scale
    return _laid_out((of_scores @ _repeated(key, query)) * scale), _laid_out(of_key), _laid_out(of_value)


def _scores(
    query: torch.Tensor, key: torch.Tensor, bounds: Maybe, key_mask: Maybe, window: int, ahead: int, scale: float
) -> torch.Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query @ _repeated(key, query).mT).to(wide) * scale
    return scores.masked_fill(~visible(query.shape[2], window, ahead, bounds, query.device, key_mask), -torch.inf)


def _repeated(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Kernels take any strides, except within a head."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, heads, length, width], in memory [batch, length, heads, width], as models and torch's kernels have it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


HALF = (torch.bfloat16, torch.float16)


def _by_triton(query: torch.Tensor) -> bool:
    return query.is_cuda and query.dtype in HALF and has_triton()


def runs_well(query: torch.Tensor, *, planned: bool) -> bool:
    """Whether the kernels take such queries; elsewhere the operator computes all scores, as torch does with a mask.

    ``planned``: whether this is a plan for a GPU, which need not be here.
    """
    there = query.dtype in HALF if planned else _by_triton(query)
    return there and query.shape[-1] in WIDTHS


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads, length, width = tensor.shape
    return tensor.new_empty(batch, length, heads, width).transpose(1, 2)


def _fake_forward(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _empty(query), query.new_empty(query.shape[:3], dtype=wide)


def _fake_backward(grad: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    return _empty(query), _empty(key), _empty(value)


window_attention_backward = define(
    "window_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, "
    "Tensor? bounds, Tensor? key_mask, int window, int ahead, float scale) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    flops=lambda grad, query, *others, **_: 10 * _seen(query, *others[6:8]),
    compiled_ahead=True,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, bounds, key_mask, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, bounds, key_mask)
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    return (*window_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 5)


window_attention_forward = define(
    "window_attention(Tensor query, Tensor key, Tensor value, Tensor? bounds, Tensor? key_mask, int window, "
    "int ahead, float scale) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    backward=_autograd,
    setup_context=_setup,
    flops=lambda query, key, value, bounds, key_mask, window, ahead, *_, **__: 4 * _seen(query, window, ahead),
    compiled_ahead=True,
)


def window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Maybe,
    key_mask: Maybe,
    window: int,
    ahead: int,
    scale: float,
) -> torch.Tensor:
    """Attention of queries [batch, heads, length, width] to ``window`` keys up to their own and ``ahead`` after it."""
    out, _ = window_attention_forward(query, key, value, bounds, key_mask, window, ahead, scale)
    return out  # type: ignore[no-any-return]


def _seen(query: Any, window: int, ahead: int) -> int:
    """Pairs of a query and a key that it sees, documents and padding aside: they are data."""
    length, window, ahead = query[2], min(query[2], window), min(query[2] - 1, ahead)
    pairs = window * length - window * (window - 1) // 2 + ahead * length - ahead * (ahead + 1) // 2
    return int(query[0] * query[1] * query[3] * pairs)
