"""A plain Llama-like language model, dense or a mixture of experts: what the demo trains and the benchmarks time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import fxshard

EPS = 1e-5


@dataclass(frozen=True)
class LlamaConfig:
    """Shapes of a Llama. ``kv_heads`` below ``heads`` means grouped-query attention.

    With ``experts`` every MLP is a mixture: each token goes to ``chosen`` of them, and ``hidden`` is that of one.
    """

    vocab: int = 32000
    dim: int = 2048
    layers: int = 16
    heads: int = 16
    kv_heads: int | None = None
    hidden: int = 5632
    experts: int = 0
    chosen: int = 2


class Attention(nn.Module):
    """Causal self-attention (positions come from causality alone: this model is for timing and demos)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.dim // config.heads
        self.q = nn.Linear(config.dim, self.heads * self.head_dim, bias=False)
        self.k = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def split(y: torch.Tensor, heads: int) -> torch.Tensor:
            return y.view(batch, length, heads, self.head_dim).transpose(1, 2)

        q, k, v = split(self.q(x), self.heads), split(self.k(x), self.kv_heads), split(self.v(x), self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def grouped_product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Torch's grouped product, or fxshard's where torch's cannot be compiled: in other types than bf16."""
    product = F.grouped_mm if x.dtype == torch.bfloat16 else fxshard.grouped_mm
    return product(x, weight, offs=offsets)


class Experts(nn.Module):
    """SwiGLU experts with stacked weights, as torchtitan writes them: tokens are sorted by expert.

    Nothing is read on the host, so routing never waits for a device. There is no loss that balances the load.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.experts, self.chosen = config.experts, config.chosen
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.w1 = self._stack(config.hidden, config.dim)
        self.w2 = self._stack(config.dim, config.hidden)
        self.w3 = self._stack(config.hidden, config.dim)

    def _stack(self, out: int, width: int) -> nn.Parameter:
        bound = width**-0.5  # as nn.Linear starts out
        return nn.Parameter(torch.empty(self.experts, out, width).uniform_(-bound, bound))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).float().softmax(-1).topk(self.chosen)
        expert = chosen.flatten()
        order = expert.argsort(stable=True)
        counts = (expert.unsqueeze(-1) == torch.arange(self.experts, device=x.device)).sum(0)
        source = (order // self.chosen).unsqueeze(-1).expand(-1, tokens.shape[-1])
        routed = self.mlp(tokens.gather(0, source), counts.cumsum(0).to(torch.int32))
        routed = routed * scores.flatten()[order].to(x.dtype).unsqueeze(-1)
        return torch.zeros_like(tokens).scatter_add(0, source, routed).view_as(x)

    def mlp(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The MLPs of tokens sorted by expert; those of expert ``e`` end at ``offsets[e]``."""
        h = F.silu(grouped_product(x, self.w1.mT, offsets)) * grouped_product(x, self.w3.mT, offsets)
        return grouped_product(h, self.w2.mT, offsets)


class Block(nn.Module):
    def __init__(self, dim: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, EPS)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(dim, EPS)
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Next-token model: ``model(tokens, targets)`` is the loss, ``model(tokens)`` the logits."""

    def __init__(self, vocab: int, dim: int, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(blocks)  # a generator's are made here, after the embedding: so seeds mean the same
        self.norm = nn.RMSNorm(dim, EPS)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Llama(LanguageModel):
    """Dense, or with experts."""

    def __init__(self, config: LlamaConfig) -> None:
        def mlp() -> nn.Module:
            return Experts(config) if config.experts else MLP(config.dim, config.hidden)

        blocks = (Block(config.dim, Attention(config), mlp()) for _ in range(config.layers))
        super().__init__(config.vocab, config.dim, blocks)
