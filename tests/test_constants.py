"""Tensors that Dynamo puts into a graph as constants: AOTAutograd passes them ahead of all parameters."""

import pytest
import torch
from torch import nn

import fxshard
from tests.pool import Pool
from tests.thorough import thorough
from tests.toy import Linears
from tests.training import full_gradients


def table() -> torch.Tensor:
    return torch.linspace(0.5, 1.5, 8)


scale = torch.compiler.assume_constant_result(table)


class Scaled(nn.Module):
    """Two layers of different shapes, so that parameters cannot take each other's places unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.tanh(self.up(x * scale())))).square().mean()


class Deep(Linears):
    """Layers that repeat, and a constant after them."""

    def __init__(self) -> None:
        super().__init__(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * scale()).square().mean()


MODELS = [Scaled, Deep]


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def sharded(make: type[nn.Module], lowering: str) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = fxshard.compile(make(), lowering=lowering)
    loss = model(data(torch.distributed.get_rank()))
    loss.backward()
    return loss.item(), full_gradients(model)


def plain(make: type[nn.Module], ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = make()
    losses = [model(data(rank)) for rank in range(ranks)]
    (sum(losses) / ranks).backward()
    return [loss.item() for loss in losses], {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("make", "lowering"), [(Scaled, "eager"), thorough(Scaled, "inductor"), thorough(Deep, "eager")]
)
def test_parameters_keep_their_places(ranks: Pool, make: type[nn.Module], lowering: str) -> None:
    expected, reference = plain(make, 2)
    for rank, (loss, gradients) in enumerate(ranks(2, sharded, make, lowering)):
        torch.testing.assert_close(loss, expected[rank])
        torch.testing.assert_close(gradients, reference)


@pytest.mark.parametrize("make", MODELS)
def test_a_plan_is_what_runs(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = fxshard.compile(make(), lowering="eager")
    loss = model(data(0))
    loss.backward()
    torch.testing.assert_close(([loss.item()], full_gradients(model)), plain(make, 1))
    planned = fxshard.plan(make(), (data(0),), world_size=1, hardware="cpu", lowering="eager")
    assert [str(event) for event in planned.events] == [str(event) for event in model.schedule.events]
