"""A small mixture-of-experts language model, with grouped experts or, as a reference, one expert after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fused.models import product
from tests.training import VOCAB

DIM, INNER, EXPERTS, CHOSEN = 16, 24, 4, 2


class Experts(nn.Module):
    """Each token goes to the experts its router prefers."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.grouped = grouped
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, DIM) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, INNER) * INNER**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        y = self.together(tokens, weights, chosen) if self.grouped else self.in_turn(tokens, weights, chosen)
        return y.reshape(x.shape)

    def together(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.reshape(-1).argsort(stable=True)
        offsets = F.one_hot(chosen.reshape(-1), EXPERTS).sum(0).cumsum(0).to(torch.int32)
        gate, up = product(x[order // CHOSEN], self.gate_up.mT, offsets).chunk(2, -1)
        y = product(F.silu(gate) * up, self.down.mT, offsets) * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // CHOSEN, y)

    def in_turn(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            scale = torch.where(chosen == expert, weights, 0).sum(-1, keepdim=True)
            gate, up = (x @ self.gate_up[expert].t()).chunk(2, -1)
            out = out + scale * ((F.silu(gate) * up) @ self.down[expert].t())
        return out


class MoeLm(nn.Module):
    """Embedding, layers of experts, head, loss."""

    def __init__(self, grouped: bool, vocab: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, DIM)
        self.layers = nn.ModuleList(Experts(grouped) for _ in range(2))
        self.head = nn.Linear(DIM, vocab, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        for layer in self.layers:
            h = h + layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def moe(grouped: bool = True, vocab: int = VOCAB) -> nn.Module:
    torch.manual_seed(0)
    return MoeLm(grouped, vocab)
