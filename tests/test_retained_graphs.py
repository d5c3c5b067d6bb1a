"""Several backwards of one forward, as in plain PyTorch; and what a compiled backward cannot do, refused on every rank
before anything is sent."""

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


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def inputs(number: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def losses(model: nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    result = model(inputs(0, rank))
    return result.square().mean(), result.sin().sum()


def two_losses(zero: int, lowering: str) -> list[dict[str, torch.Tensor]]:
    """Gradients after one loss, and after another of the same forward; an evaluation takes place in between."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = fxshard.compile(plain(), zero=zero, optimizer=fxshard.AdamW(), lowering=lowering)
    first, second = losses(model, rank)
    first.backward(retain_graph=True)
    found = [full_gradients(model)]
    with torch.no_grad():
        model(inputs(1, rank))
    second.backward()
    return [*found, full_gradients(model)]


def of_plain(ranks: int) -> list[dict[str, torch.Tensor]]:
    model = plain()
    firsts, seconds = zip(*(losses(model, rank) for rank in range(ranks)), strict=True)
    found = []
    for total in (sum(firsts) / ranks, sum(seconds) / ranks):
        total.backward(retain_graph=True)
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    return found


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_graph_that_is_kept_in_one_process(lowering: str) -> None:
    torch.testing.assert_close(two_losses(3, lowering), of_plain(1))


@pytest.mark.parametrize("zero", [thorough(1), 3])
def test_a_graph_that_is_kept_on_two_ranks(ranks: Pool, zero: int) -> None:
    for found in ranks(2, two_losses, zero, "eager"):
        torch.testing.assert_close(found, of_plain(2))


def refused(zero: int, ours: bool) -> list[Any]:
    """What is said of gradients of gradients, and of a step between a forward and its backward; then a right step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = fxshard.compile(plain(), zero=zero, optimizer=fxshard.AdamW(lr=0.1) if ours else None, lowering="eager")
    optimizer = model.optimizer if ours else torch.optim.AdamW(model.parameters(), lr=0.1)
    x = inputs(0, rank).requires_grad_()
    with pytest.raises(fxshard.StateError, match="create_graph=True"):
        torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    early, late = losses(model, rank)[0], losses(model, rank)[1]
    late.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(fxshard.StateError, match=r"ran before the last optimizer\.step"):
        early.backward()
    untouched = all(parameter.grad is None for parameter in model.parameters())
    losses(model, rank)[0].backward()
    return [untouched, full_gradients(model)]


def after_a_step(ranks: int) -> dict[str, torch.Tensor]:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    (sum(losses(model, rank)[1] for rank in range(ranks)) / ranks).backward()
    optimizer.step()
    optimizer.zero_grad()
    (sum(losses(model, rank)[0] for rank in range(ranks)) / ranks).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("zero", "ours"), [(3, True), (2, False)])
def test_what_cannot_be_computed_is_refused_before_anything_is_written(ranks: Pool, zero: int, ours: bool) -> None:
    for untouched, gradients in ranks(2, refused, zero, ours):
        assert untouched
        torch.testing.assert_close(gradients, after_a_step(2), rtol=1e-4, atol=1e-5)


def test_in_one_process_too() -> None:
    untouched, gradients = refused(3, True)
    assert untouched
    torch.testing.assert_close(gradients, after_a_step(1), rtol=1e-4, atol=1e-5)


def test_no_backward_after_other_weights_were_loaded() -> None:
    model = fxshard.compile(plain(), lowering="eager")
    early = losses(model, 0)[0]
    model.load_state_dict({name: 2 * value for name, value in model.full_state_dict().items()})
    with pytest.raises(fxshard.StateError, match=r"before a checkpoint was read"):
        early.backward()


def changed_by_hand(zero: int) -> bool:
    """A change in place between a forward and its backward is refused, as in plain PyTorch; one before it is not."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = fxshard.compile(plain(), zero=zero, lowering="eager")
    early = losses(model, rank)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    with pytest.raises(fxshard.StateError, match=r"before an operation in place .* changed parameters"):
        early.backward()
    losses(model, rank)[0].backward()
    return all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("zero", [thorough(2), 3])
def test_no_backward_after_a_change_by_hand(ranks: Pool, zero: int) -> None:
    assert changed_by_hand(zero)
    assert all(ranks(2, changed_by_hand, zero))
