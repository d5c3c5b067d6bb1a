"""A layer of experts to measure: its tensors, how people write it, and how far apart two results are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Layer:
    """Tokens sorted by expert, as evenly as routing makes them, and weights as ``nn.Linear`` has them."""

    x: torch.Tensor
    offsets: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    weights: torch.Tensor | None
    upstream: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        return [leaf for leaf in (self.x, self.gate_up, self.down, self.weights) if leaf is not None]


def make_layer(experts: int, hidden: int, inner: int, tokens: int, routed: bool, device: str) -> Layer:
    torch.manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        value = torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5
        return value.requires_grad_()

    counts = torch.randint(experts, (tokens,), device=device).bincount(minlength=experts)
    weights = torch.rand(tokens, device=device, dtype=torch.bfloat16).requires_grad_() if routed else None
    upstream = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    gate_up, down = leaf(experts, 2 * inner, hidden), leaf(experts, hidden, inner)
    return Layer(leaf(tokens, hidden), counts.cumsum(0).int(), gate_up, down, weights, upstream)


def eager(layer: Layer) -> torch.Tensor:
    gate, up = F.grouped_mm(layer.x, layer.gate_up.mT, offs=layer.offsets).chunk(2, -1)
    out = F.grouped_mm(F.silu(gate) * up, layer.down.mT, offs=layer.offsets)
    return out if layer.weights is None else out * layer.weights.unsqueeze(-1)


def dense(layer: Layer) -> torch.Tensor:
    """The MLP of a single expert as people write it: products without groups."""
    gate, up = F.linear(layer.x, layer.gate_up.flatten(0, 1)).chunk(2, -1)
    out = F.linear(F.silu(gate) * up, layer.down.flatten(0, 1))
    return out if layer.weights is None else out * layer.weights.unsqueeze(-1)


def backward(layer: Layer, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out, layer.leaves(), layer.upstream)


def step(contender: Contender, layer: Layer) -> tuple[torch.Tensor, ...]:
    """Forward and backward: the result, and gradients."""
    out = contender(layer)
    return out.detach(), *backward(layer, out)


def error(mine: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> float:
    return max(
        float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12))
        for a, b in zip(mine, theirs, strict=True)
    )


Contender = Callable[[Layer], torch.Tensor]
"""A function that computes a layer."""
