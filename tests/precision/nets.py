"""A model that is quick to capture: blocks of linears that MXFP8 takes, an embedding, norms and a head it leaves.

Small where it computes in bf16, which CPUs without bf16 products do a thousand times slower than fp32.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.toy import batch

DIM, HIDDEN, VOCAB = 64, 128, 32


def this_ranks_tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """36 tokens of a global batch: one whole block and a short one."""
    return batch(step, dist.get_world_size(), dist.get_rank(), VOCAB, size=3, length=12)


class Block(nn.Module):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width * DIM, bias=False)
        self.up = nn.Linear(width * DIM, width * HIDDEN)
        self.down = nn.Linear(width * HIDDEN, width * DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 2, checkpointed: bool = False, width: int = 1) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.emb = nn.Embedding(VOCAB, width * DIM)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width * DIM, VOCAB, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.emb(x)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.checkpointed else layer(hidden)
        logits = self.head(hidden)
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def net(checkpointed: bool = False, width: int = 1, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Net(layers, checkpointed, width)


def single(width: int = 1) -> nn.Module:
    return net(width=width, layers=1)
