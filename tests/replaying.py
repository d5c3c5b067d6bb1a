"""The same model with and without captured programs, and what a loop may do that replays must not spoil."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

import fxshard
from tests.stack import batch

Pair = tuple[fxshard.ShardedModule, fxshard.ShardedModule]
Act = Callable[[fxshard.ShardedModule], list[torch.Tensor]]


def data(model: fxshard.ShardedModule, step: int, micro: int) -> tuple[torch.Tensor, ...]:
    """A batch of ``tests.stack`` where the model is."""
    device = next(model.parameters()).device
    return tuple(value.to(device) for value in batch(step, micro))


def counts(model: fxshard.ShardedModule) -> tuple[int, int]:
    """How many programs were captured and replayed."""
    replays = model._sharding.engine.replays
    assert replays is not None
    return replays.captured, replays.replayed


def reasons(model: fxshard.ShardedModule) -> dict[str, int]:
    """Why programs ran through."""
    replays = model._sharding.engine.replays
    assert replays is not None
    return dict(replays.run_through)


def same(models: Pair) -> bool:
    ours, theirs = (model.state_dict() for model in models)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def both(models: Pair, act: Callable[..., list[torch.Tensor]], *args: Any) -> None:
    """Do the same with both; what comes out must be equal."""
    ours, theirs = (act(model, *args) for model in models)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


def step(number: int, micro: int = 1) -> Act:
    def act(model: fxshard.ShardedModule) -> list[torch.Tensor]:
        losses = []
        for i in range(micro):
            loss = model(*data(model, number, i))
            loss.backward()
            losses.append(loss.detach())
        return losses + finish(model)

    return act


def finish(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.optimizer.step()
    model.optimizer.zero_grad()
    return grads


def two_forwards(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    first, second = model(*data(model, 10, 0)), model(*data(model, 11, 0))
    second.backward()
    first.backward()
    return [first.detach(), second.detach(), *finish(model)]


def summed(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    loss = model(*data(model, 12, 0)) + 2 * model(*data(model, 13, 0))
    loss.backward()
    return [loss.detach(), *finish(model)]


def retained(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    loss = model(*data(model, 14, 0))
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach(), *finish(model)]


def dropped(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    return [model(*data(model, 15, 0)).detach()]


def evaluated(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    loss = model(*data(model, 16, 0))
    with torch.no_grad():
        between = model(*data(model, 17, 0))
    loss.backward()
    with torch.no_grad():
        behind = model(*data(model, 18, 0))
    return [loss.detach(), between, behind, *finish(model)]


def kept(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    model(*data(model, 19, 0)).backward()
    old = [p.grad for p in model.parameters()]
    then = finish(model)
    new = step(20)(model)
    return [*old, *then, *new]


def cleared_between(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    model(*data(model, 21, 0)).backward()
    loss = model(*data(model, 22, 0))
    model.optimizer.zero_grad()
    loss.backward()
    return [loss.detach(), *finish(model)]


def foreign(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    loss = model(*data(model, 23, 0))
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    loss.backward()
    return [loss.detach(), *finish(model)]


def cleared_by_hand(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    """As ``torch.optim`` clears gradients, between forward and backward; then two micro-batches that add to them."""
    found = []
    for number, clears in enumerate([True, True, True, False, False, True, False]):
        loss = model(*data(model, 40 + number, 0))
        old = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None] if number == 5 else []
        if clears:
            for parameter in model.parameters():
                parameter.grad = None
        loss.backward()
        assert all(torch.equal(now, then) for now, then in old), "gradients that somebody kept were overwritten"
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found + finish(model)


def replaced(model: fxshard.ShardedModule) -> list[torch.Tensor]:
    """Gradients that the user computes from ours, or drops, ahead of another forward and of an evaluation."""
    found = []
    for number in range(4):
        model(*data(model, 50 + number, 0)).backward()
        for i, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 0.5 if i else None
        with torch.no_grad():
            found.append(model(*data(model, 54, 0)))
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found + finish(model)


SCENARIOS: list[Act] = [
    two_forwards,
    summed,
    dropped,
    evaluated,
    kept,
    cleared_between,
    foreign,
    retained,
    cleared_by_hand,
    replaced,
]


def accumulated(model: fxshard.ShardedModule, number: int, how: str) -> list[torch.Tensor]:
    """Three micro-batches: ``plain``, the first two inside ``no_sync``, or on gradients that are ``zeroed``."""
    losses = []
    for i in range(3):
        with model.no_sync() if how == "no_sync" and i < 2 else contextlib.nullcontext():
            losses.append(model(*data(model, number, i)))
            losses[-1].backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.optimizer.step()
    model.optimizer.zero_grad(set_to_none=how != "zeroed")
    return [loss.detach() for loss in losses] + found
