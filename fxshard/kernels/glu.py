"""The gated activation between the two products: its formula, its derivative, and how gate and up share columns.

With ``g = min(gate, limit)`` and ``u = clamp(up, ±limit) + offset`` an expert computes ``g · sigmoid(alpha · g) · u``,
times the token's routing weight. SwiGLU is alpha 1, no limit, offset 0; the clamped quick-GeGLU of gpt-oss is alpha
1.702, limit 7, offset 1. Everything is computed in fp32 and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Glu:
    """A gated activation. ``interleave`` n: a joined projection has n columns of gate, n of up, and so on.

    With 0 the first half is the gate.
    """

    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0
    interleave: int = 0

    @property
    def name(self) -> str:
        if self.limit == math.inf and self.offset == 0 and self.alpha == 1:
            return "SwiGLU"
        return f"clamped quick-GeGLU (alpha {self.alpha:g}, limit {self.limit:g}, offset {self.offset:g})"


SWIGLU = Glu()
CLAMPED_GEGLU = Glu(alpha=1.702, limit=7.0, offset=1.0)


def activate(gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor | None, glu: Glu) -> torch.Tensor:
    """What the second product multiplies; ``weights`` has one routing weight per row, or is None."""
    g, u = _clamped(gate, up, glu)
    hidden = g * torch.sigmoid(glu.alpha * g) * u
    if weights is not None:
        hidden = hidden * weights.float().unsqueeze(-1)
    return hidden.to(gate.dtype)


@dataclass(frozen=True)
class Derivatives:
    """What backward needs of the activation: gradients, and the activation itself, computed again."""

    gate: torch.Tensor
    up: torch.Tensor
    hidden: torch.Tensor
    weights: torch.Tensor | None


def differentiate(
    gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor | None, grad: torch.Tensor, glu: Glu
) -> Derivatives:
    """The gradients of ``activate`` where its result has the gradient ``grad``."""
    g, u = _clamped(gate, up, glu)
    s = torch.sigmoid(glu.alpha * g)
    a = g * s
    grad = grad.float()
    grad_weights = (grad * a * u).sum(-1).to(weights.dtype) if weights is not None else None
    hidden = a * u
    if weights is not None:
        scale = weights.float().unsqueeze(-1)
        hidden, grad = hidden * scale, grad * scale
    grad_gate = grad * u * (s + glu.alpha * a * (1 - s))
    grad_up = grad * a
    if glu.limit != math.inf:
        grad_gate = grad_gate * (gate <= glu.limit)
        grad_up = grad_up * (up.abs() <= glu.limit)
    dtype = gate.dtype
    return Derivatives(grad_gate.to(dtype), grad_up.to(dtype), hidden.to(dtype), grad_weights)


def _clamped(gate: torch.Tensor, up: torch.Tensor, glu: Glu) -> tuple[torch.Tensor, torch.Tensor]:
    g, u = gate.float(), up.float()
    if glu.limit != math.inf:
        g, u = g.clamp(max=glu.limit), u.clamp(-glu.limit, glu.limit)
    return g, u + glu.offset if glu.offset else u


def split(joined: torch.Tensor, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up out of the last dimension of a joined projection."""
    if interleave == 0:
        gate, up = joined.chunk(2, -1)
        return gate, up
    if interleave == 1:
        return joined[..., ::2], joined[..., 1::2]
    gate, up = joined.unflatten(-1, (-1, 2, interleave)).unbind(-2)
    return gate.flatten(-2), up.flatten(-2)


def join(gate: torch.Tensor, up: torch.Tensor, interleave: int) -> torch.Tensor:
    """The inverse of ``split``."""
    if interleave == 0:
        return torch.cat((gate, up), -1)
    blocks = [half.unflatten(-1, (-1, interleave)) for half in (gate, up)]
    return torch.stack(blocks, -2).flatten(-3)


def interleave_glu(weight: torch.Tensor, size: int, dim: int = -1) -> torch.Tensor:
    """A joined gate-up weight (or bias) from halves to alternating blocks of ``size``. Moves values, rounds nothing."""
    gate, up = split(weight.movedim(dim, -1), 0)
    return join(gate, up, size).movedim(-1, dim)


def deinterleave_glu(weight: torch.Tensor, size: int, dim: int = -1) -> torch.Tensor:
    """From alternating blocks of ``size`` back to halves: the exact inverse of ``interleave_glu``."""
    gate, up = split(weight.movedim(dim, -1), size)
    return join(gate, up, 0).movedim(-1, dim)
