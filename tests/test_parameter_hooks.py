"""Hooks on parameters run on sharded gradients, where FSDP2 runs them; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fxshard
from tests.pool import Pool
from tests.thorough import thorough


class Two(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(self.first(x)).square().mean()


def optimizers_in_backward(model: nn.Module) -> list[str]:
    """An optimizer of its own for each parameter, which steps as soon as there is a gradient; returns the calls."""
    calls: list[str] = []
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

        def step(p: torch.Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer) -> None:
            assert p.grad is not None
            optimizer.step()
            optimizer.zero_grad()
            calls.append(name)

        parameter.register_post_accumulate_grad_hook(step)
    return calls


def losses(model: nn.Module, steps: int = 4) -> list[float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = []
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x) + model(2 * x)  # two graphs in one backward: a hook runs once
        loss.backward()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("fullgraph", [True, False])
def test_hooks_run_once_in_a_backward(fullgraph: bool) -> None:
    plain, model = Two(not fullgraph), fxshard.compile(Two(not fullgraph), fullgraph=fullgraph, lowering="eager")
    expected, found = optimizers_in_backward(plain), optimizers_in_backward(model)
    theirs = losses(plain)
    assert losses(model) == pytest.approx(theirs, rel=1e-6)
    assert sorted(found) == sorted(expected) and len(found) == 4 * 4
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_hook_can_be_removed_and_may_change_the_gradient() -> None:
    model = fxshard.compile(Two(), lowering="eager")
    weight = model.first.weight
    handle = weight.register_post_accumulate_grad_hook(lambda p: p.grad.fill_(7.0))
    model(torch.ones(2, 8)).backward()
    assert bool((weight.grad == 7).all())
    handle.remove()
    model.zero_grad()
    model(torch.ones(2, 8)).backward()
    assert not bool((weight.grad == 7).all())


def beside_fsdp2(zero: int) -> tuple[bool, bool]:
    theirs = fully_shard(Two())
    expected_calls = optimizers_in_backward(theirs)
    expected = losses(theirs)
    model = fxshard.compile(Two(), zero=zero, lowering="eager")
    calls = optimizers_in_backward(model)
    found = losses(model)
    return found == pytest.approx(expected, rel=1e-6), sorted(set(calls)) == sorted(set(expected_calls))


@pytest.mark.parametrize("zero", [thorough(0), 3])
def test_two_ranks_are_fsdp2s(ranks: Pool, zero: int) -> None:
    assert ranks(2, beside_fsdp2, zero, timeout=60) == [(True, True)] * 2


def before(register: Callable[[Any], Any]) -> None:
    plain = Two()
    register(plain.first.weight)
    fxshard.compile(plain)


def test_hooks_that_would_never_run_are_refused() -> None:
    model = fxshard.compile(Two(), lowering="eager")
    with pytest.raises(fxshard.StateError, match=r"'first\.weight' is sharded.*register_post_accumulate_grad_hook"):
        model.first.weight.register_hook(print)
    for register in (
        lambda p: p.register_hook(print),
        lambda p: p.register_post_accumulate_grad_hook(print),
    ):
        with pytest.raises(fxshard.StateError, match=r"'first\.weight' has hooks, which would never run"):
            before(register)
