"""Losses of parameters themselves, computed outside of forward: gradients are those of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from tests.pool import Pool
from tests.thorough import thorough
from tests.training import full_gradients


class Net(nn.Module):
    """One unit: ranks hold uneven rows. A parameter that forward does not use, and a scalar, which ranks hold whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.randn(5, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def elementwise(model: nn.Module) -> torch.Tensor:
    return whole(sum(p.square().sum() + p.abs().mean() + (p - 1).norm() for p in model.parameters()))


def matrices(model: nn.Module) -> torch.Tensor:
    square = model.second.weight
    return whole(torch.mm(square, square).square().sum() + square.max() + square.norm(dim=1).sum())


def of_whole(model: nn.Module) -> torch.Tensor:
    square = whole(model.second.weight)
    return (square @ square.T - torch.eye(8)).square().sum() + sum(whole(p * 2).sum() for p in model.parameters())


PENALTIES = (elementwise, matrices, of_whole)


def penalized(zero: int, ours: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients with each penalty, as part of the loss, and before and after its backward; the last of them steps."""
    model = fxshard.compile(Net(), zero=zero, optimizer=fxshard.AdamW(lr=0.1) if ours else None, lowering="eager")
    optimizer = model.optimizer if ours else torch.optim.AdamW(model.parameters(), lr=0.1)
    x = inputs(dist.get_rank())
    found = []
    for penalty in PENALTIES:
        (model(x).square().mean() + penalty(model)).backward()
        found.append(full_gradients(model))
        optimizer.zero_grad()
        penalty(model).backward()
        model(x).square().mean().backward()
        penalty(model).backward()
        found.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, model.full_state_dict()]


def of_plain(ranks: int) -> list[dict[str, torch.Tensor]]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for penalty in PENALTIES:
        for times in (1, 2):
            optimizer.zero_grad()
            loss = sum(model(inputs(rank)).square().mean() for rank in range(ranks)) / ranks
            (loss + times * penalty(model)).backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return [*found, model.state_dict()]


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(("zero", "ours"), [(3, True), thorough(3, False), (2, False)])
def test_penalties_have_the_gradients_of_plain_pytorch(ranks: Pool, zero: int, ours: bool) -> None:
    expected = of_plain(2)
    for found in ranks(2, penalized, zero, ours):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
