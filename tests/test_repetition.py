"""Tracing repeated layers once gives the plan that tracing all of them gives, event by event."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.inspect.presets import MoeConfig, moe
from fxshard.repetition import expansion
from tests.thorough import thorough
from tests.toy import Llama, batch

Example = tuple[nn.Module, tuple[Tensor, ...]]
TOKENS = batch(0, 1, 0, 96, size=2)


def llama(layers: int) -> Example:
    with torch.device("meta"):
        return Llama(layers=layers), TOKENS


def experts(layers: int) -> Example:
    """The first layer is another one than the rest."""
    shape = MoeConfig(64, 32, layers, 1, 2, 16, 8, 4, dense_hidden=64, experts=4, active=2, hidden=16)
    model, _ = moe(shape)
    return model, (torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))


class Odd(nn.Module):
    """Same layers, but something happens behind one of them, or one is used again at the end."""

    def __init__(self, layers: int, odd: int, *, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.odd, self.again = odd, again

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i == self.odd:
                kept, x = x, x * 2
        return self.layers[self.odd](x).sum() if self.again else (x + kept).sum()


class Uneven(nn.Module):
    """One layer has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=i != 3) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


def traced(example: Example, lowering: str, *, once: bool) -> tuple[fxshard.Schedule, int]:
    """The plan, and how many layers were left out of the trace."""
    removed: list[int] = []
    original = expansion._Expansion.build

    def build(self: expansion._Expansion) -> torch.fx.GraphModule:
        whole = original(self)
        removed.append(self.short.removed)
        return whole

    with mock.patch.object(expansion._Expansion, "build", build):
        schedule = fxshard.plan(*example, world_size=8, lowering=lowering, trace_once=once)
    return schedule, sum(removed)


@pytest.mark.shows("P2")
@pytest.mark.parametrize(
    ("make", "layers", "lowering", "removed"),
    [
        (llama, 7, "eager", 3),
        thorough(experts, 6, "eager", 2),
        thorough(llama, 6, "inductor", 2),
        thorough(experts, 6, "inductor", 2),
    ],
)
def test_the_plan_is_that_of_the_whole_trace(
    make: Callable[[int], Example], layers: int, lowering: str, removed: int
) -> None:
    short, left_out = traced(make(layers), lowering, once=True)
    whole, _ = traced(make(layers), lowering, once=False)
    assert left_out == removed
    for mine, theirs in zip(short.events, whole.events, strict=True):
        assert mine == theirs
    assert short == whole


@pytest.mark.parametrize("make", [lambda: Odd(6, 2), lambda: Odd(6, 2, again=True), Uneven])
def test_what_does_not_repeat_is_traced_whole(make: Callable[[], nn.Module]) -> None:
    model, x = make(), (torch.ones(4, 16),)
    short, left_out = traced((model, x), "eager", once=True)
    whole, _ = traced((model, x), "eager", once=False)
    assert left_out == 0
    assert short == whole


def test_the_first_and_the_last_layer_may_differ() -> None:
    short, left_out = traced((Odd(6, 5), (torch.ones(4, 16),)), "eager", once=True)
    whole, _ = traced((Odd(6, 5), (torch.ones(4, 16),)), "eager", once=False)
    assert left_out == 2
    assert short == whole
