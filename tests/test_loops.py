"""Loops that are not straight: several backward calls, several forward calls, other batch sizes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fxshard
from tests.pool import Pool
from tests.stack import Stack, batch
from tests.thorough import thorough
from tests.training import all_data_for, full_gradients


def this_ranks_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(step, dist.get_rank())


def plain_gradients(steps: list[int], world: int) -> dict[str, torch.Tensor]:
    """Gradients of the plain model, summed over the global batches of some steps."""
    model = Stack()
    for step in steps:
        model(*all_data_for(model, step, world)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def close(mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(mine[name], value, rtol=1e-4, atol=1e-6) for name, value in reference.items())


def loops(zero: int) -> dict[str, bool]:
    world = dist.get_world_size()
    model = fxshard.compile(Stack(), zero=zero, optimizer=fxshard.AdamW(), lowering="eager")
    found = {}

    model(*this_ranks_batch(0)).backward()
    model(*this_ranks_batch(1)).backward()
    found["two backward calls add up"] = close(full_gradients(model), plain_gradients([0, 1], world))

    model.optimizer.zero_grad(set_to_none=False)
    model(*this_ranks_batch(2)).backward()
    found["zeroed gradients start over"] = close(full_gradients(model), plain_gradients([2], world))

    model.optimizer.zero_grad()
    first, second = model(*this_ranks_batch(0)), model(*this_ranks_batch(1))
    (first + second).backward()
    found["two forward calls before backward"] = close(full_gradients(model), plain_gradients([0, 1], world))

    model.optimizer.zero_grad()
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.zeros_like(parameter)
    model(*this_ranks_batch(3)).backward()
    found["some gradients put in place by hand"] = close(full_gradients(model), plain_gradients([3], world))

    model.optimizer.zero_grad()
    x, y = this_ranks_batch(0)
    model(x[:3], y[:3]).backward()  # another batch size: recompiled, not corrupted
    model(x[3:], y[3:]).backward()
    halves = {name: 2 * value for name, value in plain_gradients([0], world).items()}
    found["another batch size"] = close(full_gradients(model), halves)
    return found


@pytest.mark.parametrize("zero", [thorough(0), thorough(1), thorough(2), 3])
def test_loops_that_are_not_straight(ranks: Pool, zero: int) -> None:
    for found in ranks(2, loops, zero):
        assert all(found.values()), found


def in_place_changes(zero: int) -> list[bool]:
    """However a parameter is changed, the next forward sees it: by hand, by loading, by a fused optimizer."""
    model = fxshard.compile(Stack(), zero=zero, lowering="eager")
    other = Stack()
    same = []

    def losses() -> bool:
        with torch.no_grad():
            return torch.allclose(model(*this_ranks_batch(0)), other(*this_ranks_batch(0)), rtol=1e-5)

    same.append(losses())
    with torch.no_grad():
        for parameter in [*model.parameters(), *other.parameters()]:
            parameter.mul_(1.5)
    same.append(losses())
    sharded = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(sharded)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    same.append(losses())
    model.load_state_dict(Stack().state_dict())
    other = Stack()
    same.append(losses())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3, fused=True) for m in (model, other)]
    for m, optimizer in zip((model, other), optimizers, strict=True):
        for _ in range(2):
            if m is model:
                m(*this_ranks_batch(1)).backward()
            else:
                m(*all_data_for(other, 1, dist.get_world_size())).backward()
            optimizer.step()
            optimizer.zero_grad()
    same.append(losses())
    return same


@pytest.mark.parametrize("zero", [thorough(0), thorough(2), 3])
def test_a_change_of_a_parameter_is_seen(ranks: Pool, zero: int) -> None:
    for same in ranks(2, in_place_changes, zero):
        assert same == [True] * 5
