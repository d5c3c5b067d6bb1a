"""Models to look at without having one: known shapes on the meta device, where weights cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxshard.bench.models import EPS, MLP, Block, LanguageModel, Llama, LlamaConfig

LENGTH = 4096
"""Tokens of the example sequence."""

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class MoeConfig:
    """Shapes of a mixture of experts in the manner of DeepSeek-V3.

    The defaults are those of Moonlight-16B-A3B (moonshotai/Moonlight-16B-A3B on Hugging Face), which has DeepSeek-V3's
    architecture at 16 B parameters, 3 B of them active.
    """

    vocab: int = 163840
    dim: int = 2048
    layers: int = 27
    dense_layers: int = 1
    heads: int = 16
    latent: int = 512
    head_dim: int = 128
    rope_dim: int = 64
    dense_hidden: int = 11264
    experts: int = 64
    active: int = 6
    shared: int = 2
    hidden: int = 1408


class LatentAttention(nn.Module):
    """Keys and values through a low-rank latent, as in DeepSeek-V2. Positions are left out: they move no parameters."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.heads, self.head_dim, self.rope_dim = config.heads, config.head_dim, config.rope_dim
        self.latent = config.latent
        self.q = nn.Linear(config.dim, config.heads * (config.head_dim + config.rope_dim), bias=False)
        self.kv_down = nn.Linear(config.dim, config.latent + config.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.latent, EPS)
        self.kv_up = nn.Linear(config.latent, config.heads * 2 * config.head_dim, bias=False)
        self.o = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2)
        latent, rope = self.kv_down(x).split([self.latent, self.rope_dim], dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = kv.split([self.head_dim, self.head_dim], dim=-1)
        k = torch.cat([k, rope.unsqueeze(1).expand(-1, self.heads, -1, -1)], dim=-1)
        # Padded values let every attention kernel run: most of them want keys and values of one length.
        y = F.scaled_dot_product_attention(q, k, F.pad(v, (0, self.rope_dim)), is_causal=True)[..., : self.head_dim]
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class BalancedExperts(nn.Module):
    """Experts as stacked weights, each with an equal share of the tokens: the shapes of a perfectly balanced router.

    Which token goes where follows from its position, so nothing depends on data; how much each of its experts counts
    comes from the router, as in the real model.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.experts, self.active = config.experts, config.active
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(config.experts, config.dim, config.hidden))
        self.up = nn.Parameter(torch.empty(config.experts, config.dim, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.dim))
        self.shared = MLP(config.dim, config.shared * config.hidden)
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=config.dim**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights = torch.sigmoid(self.router(tokens)).topk(self.active, dim=-1).values
        weights = weights / weights.sum(-1, keepdim=True)
        copies = tokens.unsqueeze(0).expand(self.active, -1, -1).reshape(self.experts, -1, x.shape[-1])
        out = torch.bmm(F.silu(torch.bmm(copies, self.gate)) * torch.bmm(copies, self.up), self.down)
        routed = (out.view(self.active, *tokens.shape) * weights.t().unsqueeze(-1)).sum(0)
        return self.shared(x) + routed.view_as(x)


class Moe(LanguageModel):
    """``model(tokens, targets)`` is the loss. Tokens times active experts must be a multiple of the experts."""

    def __init__(self, config: MoeConfig) -> None:
        def mlp(layer: int) -> nn.Module:
            dense = layer < config.dense_layers
            return MLP(config.dim, config.dense_hidden) if dense else BalancedExperts(config)

        blocks = (Block(config.dim, LatentAttention(config), mlp(i)) for i in range(config.layers))
        super().__init__(config.vocab, config.dim, blocks)


LLAMA_8B = LlamaConfig(vocab=128256, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336)
LLAMA_70B = LlamaConfig(vocab=128256, dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672)


def example(model: Callable[[Any], nn.Module], config: Any, layers: int | None = None) -> Example:
    """A model on the meta device, and a sequence with its targets."""
    with torch.device("meta"):
        tokens, targets = (torch.empty(1, LENGTH, dtype=torch.long) for _ in range(2))
        return model(replace(config, layers=layers or config.layers)), (tokens, targets)


PRESETS: dict[str, Callable[..., Example]] = {
    "llama-8b": partial(example, Llama, LLAMA_8B),
    "llama-70b": partial(example, Llama, LLAMA_70B),
    "moe-16b": partial(example, Moe, MoeConfig()),
}
"""By name: what builds ``(model, example_inputs)``, with another number of ``layers`` if asked to."""
