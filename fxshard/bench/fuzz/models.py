"""Random small models: made of blocks that share weights, keep buffers, read attributes and leave out parameters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxshard.bench.fuzz.layers import Drawn

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


class Trailing(nn.Module):
    """Reads a buffer, and changes it afterwards."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x)) - 0.1 * self.average
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)
        return x


class Halves(nn.Module):
    """Two residual sums, as a layer of a transformer has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.first(x))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.second(x))


class Deep(nn.Module):
    """As many equal layers as it takes to fold them; what is checkpointed may begin in one and end in the next, and the
    end may read what an early, middle or late layer made."""

    def __init__(self, layers: int, regions: str, skips: int | None = None, *, detached: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Halves() for _ in range(layers))
        self.regions, self.skips, self.detached = regions, skips, detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = cast(Iterable[Halves], self.layers)
        halves = [half for layer in layers for half in (layer.attend, layer.feed)]
        begin = int(self.regions == "across")
        for half in halves[:begin]:
            x = half(x)
        made = [x]
        for pair in zip(halves[begin::2], halves[begin + 1 :: 2], strict=False):
            x = _both(x, *pair) if self.regions == "none" else checkpoint(_both, x, *pair, use_reentrant=False)
            made.append(x)
        for half in halves[len(halves) - begin :]:
            x = half(x)
        if self.skips is not None:
            x = x + (made[self.skips].detach() if self.detached else made[self.skips])
        return x


def _both(x: torch.Tensor, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Any:
    return second(first(x))


def _deep(choice: random.Random) -> Deep | Drawn | None:
    """One model in ten has equal layers, and one in ten has such as were drawn."""
    share = choice.random()
    if share >= 0.2:
        return None
    if share >= 0.1:
        return Drawn(choice, WIDTH)
    layers, regions = choice.randint(7, 9), choice.choice(["none", "layers", "across"])
    return Deep(layers, regions, choice.choice([None, *range(layers)]), detached=choice.random() < 0.5)


BLOCKS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)),
    "gated": Gated,
    "scaled": Scaled,
    "counting": Counting,
    "trailing": Trailing,
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
        self.deep = _deep(random.Random(f"deep {seed}"))
        if choice.random() < 0.3:
            self.blocks[0].requires_grad_(False)
        if choice.random() < 0.3 and self.kinds.count("linear") > 1:
            first, second = [block for block, kind in zip(self.blocks, self.kinds, strict=True) if kind == "linear"][:2]
            second.weight = first.weight
        self.one_unit = choice.random() < 0.5

    def forward(self, x: torch.Tensor, which: str) -> tuple[torch.Tensor, ...]:
        for i in self.order:
            x = self.blocks[i](x)
        if self.deep is not None:
            x = self.deep(x)
        return tuple(self.heads[name](x).square().mean() / self.temperature for name in which)

    @property
    def units(self) -> list[list[str]] | None:
        """All in one unit, so that heads share a bucket; or what fxshard finds."""
        return [[name for name, _ in self.named_children()]] if self.one_unit else None
