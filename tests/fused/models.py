"""Experts in the forms people write them. Each takes tokens sorted by expert, ends of groups, and routing weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxshard.bench.models import MLP as Mlp
from fxshard.bench.models import grouped_product as product


class Titan(nn.Module):
    """torchtitan: three stacked weights, gate and up separate."""

    def __init__(self, experts: int, dim: int, inner: int, *, transposed: bool = True) -> None:
        super().__init__()
        self.transposed = transposed
        self.w1, self.w3 = (self._weight(experts, inner, dim) for _ in range(2))
        self.w2 = self._weight(experts, dim, inner)

    def _weight(self, experts: int, out: int, width: int) -> nn.Parameter:
        value = torch.randn(experts, out, width) * width**-0.5
        return nn.Parameter(value if self.transposed else value.mT.contiguous())

    def _w(self, weight: Tensor) -> Tensor:
        return weight.transpose(-2, -1) if self.transposed else weight

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        h = F.silu(product(x, self._w(self.w1), offsets))
        h = h * product(x, self._w(self.w3), offsets)
        return product(h, self._w(self.w2), offsets)


class TorchPrivate(Titan):
    """The private name of torch's product."""

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        gate, up = (torch._grouped_mm(x, self._w(w), offs=offsets) for w in (self.w1, self.w3))
        return torch._grouped_mm(up * F.silu(gate), self._w(self.w2), offs=offsets)


class WeightedBefore(Titan):
    """The routing weight multiplies the activation, which is computed in fp32."""

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        gate, up = product(x, self._w(self.w1), offsets), product(x, self._w(self.w3), offsets)
        h = weights[:, None] * (gate.float() * torch.sigmoid(gate.float()) * up.float())
        return product(h.to(x.dtype), self._w(self.w2), offsets)


class WeightedAfter(Titan):
    """The routing weight multiplies the result."""

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, offsets, weights) * weights.reshape(-1, 1)


class Joined(nn.Module):
    """Gate and up in one weight, split by ``how``."""

    def __init__(self, experts: int, dim: int, inner: int, how: str = "chunk") -> None:
        super().__init__()
        self.how = how
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, dim, inner) * inner**-0.5)

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        gate, up = self.parts(product(x, self.gate_up.mT, offsets))
        return product(F.silu(gate) * up, self.down.mT, offsets) * weights.unsqueeze(-1)

    def parts(self, h: Tensor) -> tuple[Tensor, Tensor]:
        inner = h.shape[-1] // 2
        if self.how == "split":
            gate, up = torch.split(h, inner, dim=1)
        elif self.how == "slices":
            gate, up = h[:, :inner], h[:, inner:]
        elif self.how == "alternating":
            gate, up = h[..., ::2], h[..., 1::2]
        elif self.how == "pairs of halves":
            gate, up = h.view(-1, 2, inner).unbind(1)
        elif self.how == "pairs of columns":
            pairs = h.unflatten(-1, (inner, 2))
            gate, up = pairs[..., 0], pairs[..., 1]
        elif self.how == "blocks of 32":
            blocks = h.view(h.shape[0], -1, 2, 32).transpose(1, 2).contiguous()
            gate, up = blocks.view(h.shape).chunk(2, dim=-1)
        else:
            gate, up = h.chunk(2, dim=-1)
        return gate, up


class Clamped(nn.Module):
    """gpt-oss: alternating columns, clamped quick-GeGLU, biases taken by expert, added in place."""

    def __init__(self, experts: int, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, dim, 2 * inner))
        self.gate_up_bias = nn.Parameter(torch.randn(experts, 2 * inner))
        self.down = nn.Parameter(torch.randn(experts, inner, dim) * inner**-0.5)
        self.down_bias = nn.Parameter(torch.randn(experts, dim))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        counts = torch.histc(ids.float(), bins=self.down.shape[0], min=0, max=self.down.shape[0] - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = product(x, self.gate_up, offsets)
        h.add_(self.gate_up_bias[ids])
        gate, up = h[..., ::2], h[..., 1::2]
        gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
        h = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        y = product(h, self.down, offsets)
        y.add_(self.down_bias[ids])
        return y * weights.unsqueeze(-1)


class Loop(nn.Module):
    """A loop over expert modules, each with as many tokens as its capacity says."""

    def __init__(self, experts: int, dim: int, inner: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp(dim, inner) for _ in range(experts))

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        parts = x.chunk(len(self.experts), dim=0)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


class Checkpointed(Titan):
    """Whose activations are computed again in backward: Dynamo captures a graph within the graph."""

    def forward(self, x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return checkpoint(super().forward, x, offsets, weights, use_reentrant=False)
