"""Models come and go: nothing keeps a dropped one, and the tenth compiles like the first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from tests.pool import Pool
from tests.stack import Stack, batch
from tests.toy import Mlp
from tests.training import train_step


def test_many_models_of_one_class() -> None:
    """Dynamo gives up on the ninth recompilation of a code object; each model has one of its own."""
    for _ in range(9):
        model = fxshard.compile(Mlp(7, 5), lowering="eager")
        assert model(torch.ones(2, 7)).shape == (2, 5)
        fxshard.plan(Mlp(7, 5), (torch.ones(2, 7),), world_size=2, hardware="cpu", lowering="eager")


class Stateful(nn.Module):
    """A batch norm, and a buffer that forward assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.norm(self.linear(x)).sum()


def test_submodules_and_buffers_are_those_of_the_plain_model() -> None:
    model = fxshard.compile(Stateful(), lowering="eager")
    x = torch.randn(8, 4)
    model(x)
    mean = model.norm.running_mean.clone()
    assert mean.abs().sum() > 0
    model.norm.eval()
    model(x)
    model(x)
    assert torch.equal(model.norm.running_mean, mean)
    assert float(model.state_dict()["count"]) == float(model.full_state_dict()["count"]) == 3


def test_freezing_after_compile_is_refused() -> None:
    model = fxshard.compile(Mlp(), lowering="eager")
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(fxshard.StateError, match=r"before fxshard\.compile"):
        model(torch.ones(2, 7))


def partial_load() -> list[float]:
    """One small parameter, whose rows only one rank holds: both ranks must gather its bucket again."""
    changes = []
    for zero in (2, 3):
        model = fxshard.compile(Stack(), zero=zero, lowering="eager")
        with torch.no_grad():
            before = model(*batch(0, dist.get_rank()))
            model.load_state_dict({"layers.0.bias": torch.full((7,), 3.0)}, strict=False)
            changes.append(float(model(*batch(0, dist.get_rank())) - before))
    return changes


def test_a_partial_load_reaches_every_rank(ranks: Pool) -> None:
    for changes in ranks(2, partial_load):
        assert all(abs(change) > 1e-3 for change in changes)


def uneven() -> tuple[list[float], list[float]]:
    """Ranks with batches of very different sizes, one of them recompiling alone in the middle.

    Once with an optimizer that gathers for the next forward, which may be another program on one rank, or an
    evaluation; once with torch's, which gathers nothing.
    """
    both = []
    for own in (True, False):
        model = fxshard.compile(Stack(), zero=3, optimizer=fxshard.AdamW() if own else None, lowering="eager")
        optimizer = model.optimizer if own else torch.optim.AdamW(model.parameters(), fused=True)
        losses = []
        for step, size in enumerate((2, 64, 2)):
            size = size if dist.get_rank() else 2
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(size, 7, generator=generator), torch.randn(size, 5, generator=generator)
            if step == 1:
                with torch.no_grad():
                    losses.append(float(model(x, y)))
            losses.append(float(train_step(model, x, y, optimizer=optimizer)))
        both.append(losses)
    return both[0], both[1]


def test_ranks_with_uneven_batches(ranks: Pool) -> None:
    for own, plain in ranks(2, uneven):
        assert own == plain
