"""What is put off until the first step has been taken is done then, once, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch

import fxshard
from fxshard.helpers import beside, first_step
from tests.toy import Mlp

Done = list[threading.Thread]


@pytest.fixture
def done() -> Done:
    found: Done = []
    first_step.put_off(lambda: found.append(threading.current_thread()))
    return found


@pytest.fixture
def model() -> fxshard.ShardedModule:
    return fxshard.compile(Mlp(), optimizer=fxshard.AdamW(), lowering="eager")


def loss(model: fxshard.ShardedModule) -> torch.Tensor:
    return model(torch.randn(4, 7), torch.randn(4, 5))  # type: ignore[no-any-return]


def backward_and_step(model: fxshard.ShardedModule) -> None:
    loss(model).backward()
    model.optimizer.step()


def forward_twice(model: fxshard.ShardedModule) -> None:
    loss(model)
    loss(model)


@pytest.mark.parametrize("take", [backward_and_step, forward_twice])
def test_it_is_done_once(
    done: Done, model: fxshard.ShardedModule, take: Callable[[fxshard.ShardedModule], None]
) -> None:
    take(model)
    take(model)
    beside.finish_all()
    assert len(done) == 1 and done[0] is not threading.current_thread()


def test_not_before(done: Done, model: fxshard.ShardedModule) -> None:
    loss(model).backward()
    beside.finish_all()
    assert not done
    first_step.taken()
    beside.finish_all()
    assert len(done) == 1


def test_nobody_stays_behind_it() -> None:
    with mock.patch.object(first_step, "dismiss") as dismiss:
        first_step.taken()
    dismiss.assert_called_once_with()
