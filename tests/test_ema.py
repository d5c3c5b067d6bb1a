"""Averages of weights and norms for logging, on shards, against torch's on the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxshard
from tests.pool import Pool
from tests.stack import Stack, batch
from tests.training import deliver, random_gradients

CHOICE = fxshard.AdamW(lr=1e-2)
DECAY = 0.8


def averaged(zero: int, layout: Any) -> list[str]:
    model = fxshard.compile(Stack(), zero=zero, layout=layout, lowering="eager", optimizer=CHOICE)
    plain = Stack()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    theirs = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    theirs.update_parameters(plain)  # the first time it copies
    ema = fxshard.EMA(model, DECAY)
    for seed in range(3):
        grads = random_gradients(plain, seed)
        deliver(model, grads)
        for name, grad in grads.items():
            plain.get_parameter(name).grad = grad
        model.optimizer.step()
        optimizer.step()
        ema.update()
        theirs.update_parameters(plain)
    x, y = batch(0, 0)
    wrong = []
    with torch.no_grad():
        trained = model(x, y)
        with ema.swapped():
            inside = model(x, y)
            with pytest.raises(fxshard.StateError, match="inside swapped"):
                ema.update()
        if not torch.equal(model(x, y), trained):
            wrong.append("the weights did not come back")
        if not torch.allclose(inside, theirs.module(x, y), rtol=1e-6):
            wrong.append("the model does not compute with the averages")
    full, now = ema.full_state_dict(), model.full_state_dict()
    expected = theirs.module.state_dict()
    wrong += [name for name in expected if not torch.equal(full[name], expected[name])]
    wrong += [f"now {name}" for name, value in plain.state_dict().items() if not torch.equal(now[name], value)]
    other = fxshard.EMA(fxshard.shard(Stack(), zero=2, optimizer=CHOICE), DECAY)
    other.load_state_dict(full)
    wrong += [f"loaded {n}" for n, value in other.full_state_dict().items() if not torch.equal(value, expected[n])]
    again = fxshard.EMA(fxshard.shard(Stack(), zero=zero, layout=layout, optimizer=CHOICE), DECAY)
    again.load_state_dict(ema.state_dict())
    wrong += [f"sharded {n}" for n, value in again.full_state_dict().items() if not torch.equal(value, expected[n])]
    cut = fxshard.EMA(fxshard.shard(Stack(), zero=0 if layout == "auto" else 3, optimizer=CHOICE), DECAY)
    cut.load_state_dict(ema.state_dict())
    wrong += [f"cut {n}" for n, value in cut.full_state_dict().items() if not torch.equal(value, expected[n])]
    return wrong


@pytest.mark.parametrize(("zero", "layout"), [(1, "auto"), (3, "whole")])
def test_an_average_is_torchs(ranks: Pool, zero: int, layout: str) -> None:
    assert ranks(2, averaged, zero, layout) == [[], []]


def rows_of_one_rank() -> None:
    """As ``fxshard.load`` on two ranks gives them, in ``extra``, where one rank saved them."""
    model = fxshard.shard(Stack(), zero=3, optimizer=CHOICE)
    ema = fxshard.EMA(model, DECAY)
    before = ema.full_state_dict()
    alone = DeviceMesh("cpu", [0])
    given = {name: DTensor.from_local(value.clone() + 1, alone, [Shard(0)]) for name, value in before.items()}
    with pytest.raises(fxshard.StateError, match=r"the rows of one of 1 ranks, and here are 2"):
        ema.load_state_dict(given)
    with pytest.raises(fxshard.StateError, match=r"the rows of one of 1 ranks, and here are 2"):
        model.load_state_dict(given)
    assert all(torch.equal(value, before[name]) for name, value in ema.full_state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in model.full_state_dict().items())


def test_rows_of_another_number_of_ranks_are_refused(ranks: Pool) -> None:
    ranks(2, rows_of_one_rank)


def test_what_an_average_refuses() -> None:
    with pytest.raises(fxshard.ConfigError, match="got Stack"):
        fxshard.EMA(Stack())  # type: ignore[arg-type]
    model = fxshard.shard(Stack())
    with pytest.raises(fxshard.ConfigError, match="decay=2"):
        fxshard.EMA(model, decay=2)
    ema = fxshard.EMA(model)
    with pytest.raises(fxshard.StateError, match=r"written inside EMA\.swapped"), ema.swapped():
        model.load_state_dict(model.full_state_dict())
    with ema.swapped():
        model.state_dict()
    before = ema.full_state_dict()
    given = {**Stack().state_dict(), "head.bias": torch.zeros(3)}
    with pytest.raises(fxshard.StateError, match=r"head\.bias; nothing was loaded"):
        ema.load_state_dict(given)
    assert all(torch.equal(value, before[name]) for name, value in ema.full_state_dict().items())


def norms(mesh_shape: tuple[int, ...]) -> list[str]:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    model = fxshard.shard(Stack(), mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names), optimizer=CHOICE)
    grads = random_gradients(Stack(), 0)
    del grads["layers.1.bias"]
    deliver(model, grads)
    wrong = []
    values = {name: value.detach() for name, value in Stack().named_parameters()}
    for of, expected in (("grad", grads), ("param", values)):
        found = model.norms(of)
        assert list(found) == ["", *[name for name in values if name in expected]]
        total = torch.cat([value.flatten() for value in expected.values()]).norm()
        wrong += [name for name, v in expected.items() if not torch.allclose(found[name], v.norm(), rtol=1e-5)]
        wrong += [] if torch.allclose(found[""], total, rtol=1e-5) else [of]
    if not torch.allclose(model.norms()[""], model.clip_grad_norm_(1e9), rtol=1e-5):
        wrong.append("clipping counts otherwise")
    return wrong if dist.is_initialized() else ["no ranks"]


@pytest.mark.shows("O7")
def test_norms_are_those_of_whole_tensors(ranks: Pool) -> None:
    assert ranks(2, norms, (2,)) == [[]] * 2
    assert ranks(4, norms, (2, 2)) == [[]] * 4
