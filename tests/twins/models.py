"""Models of layers that are alike, and whether Dynamo passes them by and training comes to the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxshard

WIDTH, LAYERS, STEPS = 4, 6, 2
ALL = LAYERS - 1
"""All but the first are passed by."""


class Layer(nn.Module):
    """What the layers of these tests are made of: a product, something to set, and something nested to set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = 1.0
        self.options = {"inner": {"scale": 1.0}}
        self.found: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * self.scale * self.options["inner"]["scale"]


class Normed(Layer):
    """Layers that write to buffers and draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.norm(self.linear(x)))


class Model(nn.Module):
    """Layers behind something that makes what they are given want a gradient, as an embedding does."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.scale = 1.0
        self.extra = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.through(self.first(x)) * self.scale * getattr(self, "extra", 1.0)).square().mean()

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int, size: int = 3) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, change: Callable[[Any], object] | None) -> list[Tensor]:
    """Losses and gradients of steps, with a change to the model behind the first."""
    left = []
    for step in range(STEPS):
        torch.manual_seed(step)
        random.seed(step)
        loss = model(batch(step))
        loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        if change is not None and step == 0:
            change(getattr(model, "_inner", model))
    return [*left, *(buffer.clone() for buffer in model.buffers())]


def passed_by(make: Callable[[], nn.Module], change: Callable[[Any], object] | None = None) -> int:
    """How many layers Dynamo passed by, having checked that training gives what plain PyTorch gives, and if there were
    any the bits of tracing them all. After a change it may not: Dynamo itself does not see each one.
    """
    torch.manual_seed(0)
    plain = make()
    found, model = compiled(plain, change, once=True)
    passed = model.compilations.layers_passed_by
    if passed and change is None:
        whole, other = compiled(plain, change, once=False)
        assert other.compilations.layers_passed_by == 0
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), change)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    return passed


def compiled(
    plain: nn.Module, change: Callable[[Any], object] | None, *, once: bool
) -> tuple[list[Tensor], fxshard.ShardedModule]:
    model = fxshard.compile(copy.deepcopy(plain), optimizer=fxshard.AdamW(lr=1e-2), lowering="eager", trace_once=once)
    return train(model, model.optimizer, change), model


def forward(run: Callable[..., Any]) -> type[Layer]:
    """A class of layers with another forward."""
    return type("Other", (Layer,), {"forward": run})


def through(run: Callable[..., Any], layer: Callable[[], nn.Module] = Layer) -> Callable[[], Model]:
    """A model that calls its layers in another way."""
    return lambda: type("Other", (Model,), {"through": run})(layer)
