"""The largest logit of each head of an attention: what fused kernels compute and never write down.

Scores are computed once more, in chunks of queries, and only their largest are kept. That is one of the two products of
attention's forward (with a causal mask, chunks leave out keys that none of their queries sees), and each chunk is
written and read in fp32. Results of the attentions of a model pass through all of them as one tensor, in which each
puts its own after those of the ones before: so repeated layers stay equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from fxshard.kernels.ops import define

SCORES = 2**26
"""How many scores are computed at a time, at least those of one query: 256 MiB."""
Maybe = torch.Tensor | None


def largest_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Maybe,
    bounds: Maybe,
    window: int,
    ahead: int,
    scale: float,
    at_a_time: int = SCORES,
) -> torch.Tensor:
    """Of queries [batch, heads, length, width], to keys of as many heads or of fewer, what each head has at most.

    ``mask`` is that of ``scaled_dot_product_attention``. What counts are the last ``window`` keys up to a
    query and ``ahead`` after it, and of these those of its document (``bounds``, see ``window_op``).
    """
    (batch, heads, length, width), (_, shared, keys, _) = query.shape, key.shape
    queries, key = query.unflatten(1, (shared, -1)), key.reshape(batch * shared, keys, width)
    found = query.new_full((heads,), -torch.inf, dtype=torch.float32)
    rows = max(1, at_a_time // max(1, batch * heads * keys))
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        seen = min(end + ahead, keys)
        chunk = queries[:, :, :, begin:end].reshape(batch * shared, -1, width)
        scores = _product(chunk, key[:, :seen].mT).view(batch, heads, end - begin, seen)
        if begin + 1 + ahead < seen or end > window or bounds is not None:
            scores.masked_fill_(_hidden(begin, end, seen, window, ahead, bounds, query.device), -torch.inf)
        if mask is not None:
            part = mask.expand(batch, heads, length, keys)[:, :, begin:end, :seen]
            # What is added is added to logits; the largest is scaled below.
            scores = scores.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else scores.add_(part / scale)
        found = torch.maximum(found, scores.amax((0, 2, 3)))
    return found * scale


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In fp32, of what is given in any precision."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _hidden(
    begin: int, end: int, seen: int, window: int, ahead: int, bounds: Maybe, device: torch.device
) -> torch.Tensor:
    queries, keys = torch.arange(begin, end, device=device)[:, None], torch.arange(seen, device=device)
    hidden = (keys - queries > ahead) | (queries - keys >= window)
    if bounds is None:
        return hidden
    first, after = bounds[:, :, begin:end, None]
    return (hidden | (keys < first) | (keys >= after))[:, None]


def _push(tally: torch.Tensor, query: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.cat((tally[query.shape[1] :], largest_logits(query, *rest)))


push_largest_logits = define(
    "push_largest_logits(Tensor tally, Tensor query, Tensor key, Tensor? mask, Tensor? bounds, int window, int ahead,"
    " float scale) -> Tensor",
    _push,
    lambda tally, *_: torch.empty_like(tally),
)
"""``tally`` without as many of its first numbers as there are heads, and the largest logits of these at its end."""


@register_flop_formula(torch.ops.fxshard.push_largest_logits)
def _(tally: Any, query: Any, key: Any, mask: Any, bounds: Any, window: int, ahead: int, *_: Any, **__: Any) -> int:
    return int(2 * query[0] * query[1] * query[2] * query[3] * key[2]) // (1 if ahead else 2)
