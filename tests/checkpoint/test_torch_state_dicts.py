"""``get_state_dict`` and ``set_state_dict`` of torch with whole tensors, as scripts for FSDP2 call them: rows land
where they belong, and training goes on as plain PyTorch's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fxshard
from tests.pool import Pool
from tests.thorough import thorough
from tests.training import deliver, random_gradients


def plain(seed: int = 0) -> nn.Module:
    """The last bias has a row for each of two ranks: torch would copy one into both rows of the rank that has them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))


def sharded(ours: bool, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    choice = fxshard.AdamW(lr=0.1, state="8bit") if ours else None
    model = fxshard.shard(plain(seed), zero=3, optimizer=choice)
    return model, model.optimizer if ours else torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: fxshard.ShardedModule, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        deliver(model, random_gradients(plain(), step))
        optimizer.step()
        optimizer.zero_grad()


def resumed(ours: bool, broadcast: bool) -> dict[str, torch.Tensor]:
    model, optimizer = sharded(ours)
    train(model, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if broadcast:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        weights, state = (weights, state) if dist.get_rank() == 0 else ({}, {})
    other, optimizer = sharded(ours, seed=1)
    set_model_state_dict(other, weights, options=options)
    set_optimizer_state_dict(other, optimizer, state, options=options)
    train(other, optimizer, range(2, 4))
    return other.full_state_dict()


def expected() -> dict[str, torch.Tensor]:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        for name, gradient in random_gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("ours", "broadcast"), [(False, True), (True, False), thorough(False, False), thorough(True, True)]
)
def test_whole_tensors_are_cut_into_the_rows_that_ranks_hold(ranks: Pool, ours: bool, broadcast: bool) -> None:
    for found in ranks(2, resumed, ours, broadcast):
        torch.testing.assert_close(found, dict(expected()), rtol=1e-4, atol=1e-5)
