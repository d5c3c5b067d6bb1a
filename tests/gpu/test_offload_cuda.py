"""Activations on the host of a GPU: peaks are below the budget and as predicted, and losses are those without one."""

from __future__ import annotations

import pytest
import torch

import fxshard
from fxshard.bench.models import Llama
from tests.gpu.test_budget_cuda import BF16, SIZE, run

pytestmark = pytest.mark.gpu


def smallest(**options: str) -> int:
    """The least that a plan says works, and a hundredth for what it does not know."""
    with torch.device("meta"):
        model = Llama(SIZE)
        batch = torch.empty(4, 1024, dtype=torch.int64)
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


def test_a_captured_program_computes_again_in_place_of_offloading() -> None:
    schedule, _, _ = run(smallest(activations="recompute"), cuda_graphs=True)
    assert schedule.recomputed and not schedule.offloaded
