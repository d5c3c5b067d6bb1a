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
