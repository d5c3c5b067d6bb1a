"""The largest logits of heads, chunk by chunk, are those of all logits at once."""

from __future__ import annotations

import math

import pytest
import torch

from fxshard.kernels.logits_op import largest_logits, push_largest_logits
from fxshard.kernels.window_op import UNLIMITED, document_bounds, visible

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 7, 8


def heads(count: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(BATCH, length, count, WIDTH).transpose(1, 2)  # as models have them


def all_logits(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Of each head the largest; ``mask`` is added."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query.double() @ key.double().mT * scale + mask).amax((0, 2, 3)).float()


def added(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)


@pytest.mark.parametrize("at_a_time", [1, 3 * BATCH * HEADS * LENGTH, 10**6])
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_whatever_a_query_sees(at_a_time: int, shared: int) -> None:
    torch.manual_seed(0)
    query, key, scale = heads(HEADS), heads(shared), 0.3
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    some = torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.4
    slopes = torch.randn(1, HEADS, LENGTH, LENGTH)
    bounds = document_bounds(torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]]))
    near = visible(LENGTH, 3, 0, None, query.device)
    around = visible(LENGTH, 2, 1, None, query.device)
    apart = visible(LENGTH, LENGTH, 0, bounds, query.device)
    together = visible(LENGTH, LENGTH, LENGTH, bounds, query.device)
    for given, mask in [
        ((None, None, UNLIMITED, UNLIMITED), torch.zeros(())),
        ((None, None, UNLIMITED, 0), added(causal)),
        ((some, None, UNLIMITED, UNLIMITED), added(some)),
        ((some[:1, 0], None, UNLIMITED, UNLIMITED), added(some[:1, 0])),
        ((slopes, None, UNLIMITED, UNLIMITED), slopes),
        ((None, None, 3, 0), added(near)),
        ((None, None, 2, 1), added(around)),
        ((None, bounds, LENGTH, 0), added(apart)),
        ((None, bounds, LENGTH, LENGTH), added(together)),
    ]:
        found = largest_logits(query, key, *given, scale, at_a_time)
        torch.testing.assert_close(found, all_logits(query, key, mask, scale))


def test_causal_counts_from_the_first_key_as_torch_does() -> None:
    query, key = heads(HEADS, 3), heads(HEADS, 5)
    seen = torch.ones(3, 5, dtype=torch.bool).tril()
    found = largest_logits(query, key, None, None, UNLIMITED, 0, 1.0)
    torch.testing.assert_close(found, all_logits(query, key, added(seen), 1.0))


def test_the_operator_puts_them_behind_those_of_others() -> None:
    query, key, tally = heads(HEADS), heads(2), torch.arange(10.0)
    found = push_largest_logits(tally, query, key, None, None, UNLIMITED, 0, 0.5)
    assert torch.equal(found, torch.cat((tally[4:], largest_logits(query, key, None, None, UNLIMITED, 0, 0.5))))
    torch.library.opcheck(torch.ops.fxshard.push_largest_logits, (tally, query, key, None, None, UNLIMITED, 0, 0.5))
