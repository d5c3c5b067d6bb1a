"""measure_logits: heads are found wherever their rows are, and what would not be bounded is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard

BATCH, LENGTH, HEADS, WIDTH, DIM = 2, 6, 2, 8, 12
Made = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, [batch, heads, length, width]."""
HALF = WIDTH // 2


def one_after_another(x: Tensor) -> Made:
    q, k, v = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in x.split(HEADS * WIDTH, -1))
    return q, k, v


def in_turn(x: Tensor) -> Made:
    q, k, v = x.view(BATCH, LENGTH, HEADS, 3 * WIDTH).transpose(1, 2).chunk(3, -1)
    return q, k, v


def unbound(x: Tensor) -> Made:
    q, k, v = x.reshape(BATCH, LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def angles() -> Tensor:
    return torch.arange(LENGTH)[:, None] / torch.arange(1, HALF + 1)


def turned(x: Tensor) -> Made:
    """Rotary positions on halves of a head, of scaled queries."""
    q, k, v = one_after_another(x)
    cos, sin = angles().cos().repeat(1, 2), angles().sin().repeat(1, 2)

    def turn(h: Tensor) -> Tensor:
        return h * cos + torch.cat((-h[..., HALF:], h[..., :HALF]), -1) * sin

    return turn(q) * 1.5, turn(k), v


def turned_in_part(x: Tensor) -> Made:
    """On the first two of each head."""
    q, k, v = in_turn(x)

    def turn(h: Tensor) -> Tensor:
        (a, b), rest = h[..., :2].unbind(-1), h[..., 2:]
        cos, sin = angles()[:, 0].cos(), angles()[:, 0].sin()
        return torch.cat((torch.stack((a * cos - b * sin, a * sin + b * cos), -1), rest), -1)

    return turn(q), turn(k), v


def complex_numbers(x: Tensor) -> Made:
    q, k, v = one_after_another(x)
    unit = torch.polar(torch.ones(LENGTH, HALF), angles())

    def turn(h: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(h.float().unflatten(-1, (-1, 2))) * unit).flatten(-2)

    return turn(q), turn(k), v


def scaled_before(x: Tensor) -> Made:
    return one_after_another(x * 0.5)


class Attention(nn.Module):
    def __init__(self, make: Callable[[Tensor], Made], bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(DIM, 3 * HEADS * WIDTH, bias=bias)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.make(self.qkv(x))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()


@pytest.mark.parametrize(
    "make", [one_after_another, in_turn, unbound, turned, turned_in_part, complex_numbers, scaled_before]
)
def test_clipped_heads_have_the_limit_and_others_their_bits(make: Callable[[Tensor], Made]) -> None:
    """Measured by hand on plain models; a limit between the two heads clips one of them."""
    torch.manual_seed(1)
    x, plain = torch.randn(BATCH, LENGTH, DIM), Attention(make)

    def largest() -> Tensor:
        q, k, _ = make(plain.qkv(x))
        logits = (q @ k.mT).detach() * WIDTH**-0.5
        return logits.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf).amax((0, 2, 3))

    before = largest()
    limit = float(before.mean())
    model = fxshard.compile(Attention(make), optimizer=fxshard.AdamW(lr=0.0, qk_clip=limit), lowering="eager")
    model(x).backward()
    model.optimizer.step()
    plain.load_state_dict(model.full_state_dict())
    torch.testing.assert_close(largest(), before.clamp(max=limit))
    *_, values = make(plain.qkv(x))
    *_, as_they_were = make(Attention(make).qkv(x))
    assert torch.equal(values, as_they_were)


def picked(x: Tensor) -> Made:
    q, k, v = one_after_another(x)
    return q[:, torch.tensor([1, 0])], k, v


def normalized(x: Tensor) -> Made:
    q, k, v = one_after_another(x)
    return F.rms_norm(q, (WIDTH,)), k, v


def summed(x: Tensor) -> Made:
    """Both heads have the same queries."""
    q, k, v = one_after_another(x)
    return q[:, :1].expand_as(q), k, v


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (picked, "getitem at the model itself lies between them and their linear layer"),
        (normalized, "rms_norm at the model itself lies between them and their linear layer"),
        (summed, "has 2 heads, but the weights that make its queries have 1"),
    ],
)
def test_other_heads_are_refused(make: Callable[[Tensor], Made], why: str) -> None:
    model = fxshard.compile(Attention(make), optimizer=fxshard.AdamW(qk_clip=1.0), lowering="eager")
    with pytest.raises(fxshard.CaptureError, match=why):
        model(torch.randn(BATCH, LENGTH, DIM))


def test_frozen_projections_are_refused() -> None:
    plain = Attention(one_after_another)
    plain.qkv.weight.requires_grad_(False)
    model = fxshard.compile(plain, optimizer=fxshard.AdamW(qk_clip=1.0), lowering="eager")
    with pytest.raises(fxshard.CaptureError, match=r"weight_ in .* is no parameter that is trained"):
        model(torch.randn(BATCH, LENGTH, DIM))
