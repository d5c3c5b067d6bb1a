"""A product, and one over few columns that is added to it, as one operator: the layer of an adapter and its adapter."""

from __future__ import annotations

import torch

from fxshard.kernels import hopper_products
from fxshard.kernels.ops import define

WIDE = hopper_products.SHALLOWEST
"""What the larger product must be summed over at least."""
NARROW = 256
"""What the smaller one may be summed over at most: ranks of adapters."""


def _sum(a: torch.Tensor, b: torch.Tensor, narrow: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    a, narrow = a.contiguous(), narrow.contiguous()
    if hopper_products.adds(a, b, narrow, other):
        return hopper_products.sum_of_products(a, b, narrow, other)
    return torch.addmm(a.mm(b), narrow, other)


def _fake(a: torch.Tensor, b: torch.Tensor, narrow: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


sum_of_products = define(
    "sum_of_products(Tensor a, Tensor b, Tensor narrow, Tensor other) -> Tensor",
    _sum,
    _fake,
    flops=lambda a, b, narrow, other, **_: 2 * a[0] * b[1] * (a[1] + narrow[1]),
    compiled_ahead=True,
)
"""``a·b + narrow·other``, where the kernel is used summed up in fp32 and rounded once."""
