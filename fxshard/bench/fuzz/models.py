"""Random small models: made of blocks that share weights, keep buffers, read attributes and leave out parameters."""

from __future__ import annotations

import random

import torch
from torch import nn

WIDTH = 8


class Gated(nn.Module):
    """Reads an attribute and a buffer, which a program may write."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), 1.0
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.gain + self.shift


class Scaled(nn.Module):
    """A scalar parameter, and one of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.bias


class Counting(nn.Module):
    """Changes a buffer while it trains."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return torch.relu(self.linear(x - self.mean))


BLOCKS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)),
    "gated": Gated,
    "scaled": Scaled,
    "counting": Counting,
}


class RandomModel(nn.Module):
    """Blocks in a row, some of them twice, some frozen; two heads of which a call uses one, or both."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choice = random.Random(seed)
        torch.manual_seed(seed)
        self.kinds = [choice.choice(list(BLOCKS)) for _ in range(choice.randint(1, 5))]
        self.blocks = nn.ModuleList(BLOCKS[kind]() for kind in self.kinds)
        self.order = [i for i in range(len(self.kinds)) for _ in range(choice.choice([1, 1, 1, 2]))]
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, choice.randint(1, 3)) for name in ("a", "b")})
        self.never = nn.Linear(3, 3) if choice.random() < 0.3 else None
        self.temperature = 1.0
        if choice.random() < 0.3:
            self.blocks[0].requires_grad_(False)
        if choice.random() < 0.3 and self.kinds.count("linear") > 1:
            first, second = [block for block, kind in zip(self.blocks, self.kinds, strict=True) if kind == "linear"][:2]
            second.weight = first.weight
        self.one_unit = choice.random() < 0.5

    def forward(self, x: torch.Tensor, which: str) -> tuple[torch.Tensor, ...]:
        for i in self.order:
            x = self.blocks[i](x)
        return tuple(self.heads[name](x).square().mean() / self.temperature for name in which)

    @property
    def units(self) -> list[list[str]] | None:
        """All in one unit, so that heads share a bucket; or what fxshard finds."""
        return [[name for name, _ in self.named_children()]] if self.one_unit else None
