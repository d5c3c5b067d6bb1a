"""Activations on the host of a GPU: peaks are below the budget and as predicted, and losses are those without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fxshard
from fxshard.bench.models import Llama
from tests.gpu import test_cuda_graphs as graphs
from tests.gpu.test_budget_cuda import BF16, SIZE, run
from tests.replaying import both, counts, finish, reasons, same

pytestmark = pytest.mark.gpu


def language_model() -> Llama:
    """Its embedding is frozen: Inductor adds up that gradient by atomic additions, whose order nobody knows."""
    model = Llama(SIZE)
    model.embed.requires_grad_(False)
    return model


def tokens(number: int) -> torch.Tensor:
    """Short sequences: over long ones attention adds up gradients of queries in an order of its own."""
    return graphs.tokens(number, 32, 128)


def train(model: fxshard.ShardedModule, number: int) -> list[torch.Tensor]:
    loss = model(tokens(number), tokens(number))
    loss.backward()
    return [loss.detach(), *finish(model)]


def smallest(
    make: Callable[[], Llama] = lambda: Llama(SIZE), shape: tuple[int, int] = (4, 1024), **options: str
) -> int:
    """The least that a plan says works, and a hundredth for what it does not know."""
    with torch.device("meta"):
        model = make()
        batch = torch.empty(shape, dtype=torch.int64)
    with pytest.raises(fxshard.BudgetError) as caught:
        settings = {"world_size": 1, "hardware": "h200", "precision": BF16, "optimizer": fxshard.AdamW(), **options}
        fxshard.plan(model, (batch, batch), memory_budget=1, **settings)  # type: ignore[arg-type]
    return int(caught.value.smallest * 1.01)


@pytest.mark.shows("M1", "M3", "M4")
def test_offloaded_activations_leave_the_device_and_come_back() -> None:
    roomy, losses, peak = run(None)
    budget = smallest(activations="offload")
    schedule, again, measured = run(budget, activations="offload")
    assert schedule.offloaded and not schedule.recomputed
    assert measured <= budget < roomy.peak_bytes and measured < peak
    assert measured == pytest.approx(schedule.step_bytes, rel=0.03)
    assert again == pytest.approx(losses, rel=1e-3)  # segments end at other places, where Inductor fuses less


@pytest.mark.shows("M1", "M4")
def test_the_smallest_budget_uses_the_host() -> None:
    budget = smallest()
    assert budget < smallest(activations="recompute")
    schedule, losses, measured = run(budget)
    assert schedule.offloaded and measured <= budget
    assert losses == pytest.approx(run(None)[1], rel=1e-3)  # Inductor rounds less between nodes that it fuses


@pytest.mark.shows("M4")
def test_copies_to_the_host_and_back_are_captured() -> None:
    """Also where a replay would overwrite what another backward still has to read on the host."""
    budget = smallest(language_model, (32, 128), activations="offload")
    models = graphs.pair(
        language_model, precision=BF16, lowering="inductor", memory_budget=budget, activations="offload"
    )
    for number in range(4):
        both(models, train, number)
    assert models[0].schedule.offloaded and models[0].schedule == models[1].schedule
    assert counts(models[0]) == (2, 4), reasons(models[0])

    def two_forwards(model: fxshard.ShardedModule) -> list[torch.Tensor]:
        losses = [model(x, x) for x in (tokens(10), tokens(11))]
        for loss in losses:
            loss.backward()
        return [*(loss.detach() for loss in losses), *finish(model)]

    def retained(model: fxshard.ShardedModule) -> list[torch.Tensor]:
        loss = model(tokens(12), tokens(12))
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach(), *finish(model)]

    for act in (two_forwards, retained, two_forwards):
        both(models, act)
        both(models, train, 13)
    assert counts(models[0])[1] >= 8, reasons(models[0])
    assert same(models)
