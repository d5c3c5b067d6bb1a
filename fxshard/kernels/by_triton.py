"""Experts with kernels of our own for all products, on a Hopper GPU.

The first product, gate and up, and the activation are one kernel. A tile of it computes the same columns of gate and of
up, so the activation needs nothing from another tile: the pre-activations are written once (backward wants them) and
never read again in forward.
"""

from __future__ import annotations

import torch

from fxshard.kernels import hopper_products
from fxshard.kernels.by_torch import Call, TorchExperts


class TritonExperts(TorchExperts):
    """The implementation ``triton``."""

    takes_dense = True

    def product(self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if hopper_products.multiplies(x, weight):
            return hopper_products.product(x, weight, offsets.int())
        return super().product(x, weight, offsets)

    def up(self, x: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        experts, offsets = call.experts, call.offsets
        x = x.contiguous()
        matrices = (experts.gate,) if experts.up is None else (experts.gate, experts.up)
        if hopper_products.multiplies(x, *matrices):
            return hopper_products.up(x, experts.gate, experts.up, call.weights, offsets.int(), call.glu)
        return super().up(x, call)

    def weight_gradient(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        a, b = a.contiguous(), b.contiguous()
        if hopper_products.differentiates(a, b):
            return hopper_products.gradient(a, b, offsets.int())
        return super().weight_gradient(a, b, offsets)
