"""Budgets on a GPU: peaks are below them and as predicted, and losses are those without a budget."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import fxshard
from fxshard.bench.models import Llama, LlamaConfig

pytestmark = pytest.mark.gpu
SIZE = LlamaConfig(vocab=8192, dim=1024, layers=8, heads=8, hidden=2816)
BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)
STEPS = 3


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, SIZE.vocab, (4, 1024), generator=torch.Generator().manual_seed(step)).cuda()


def run(budget: int | None, **options: Any) -> tuple[fxshard.Schedule, list[float], int]:
    """The schedule, losses, and what was allocated at the peak of a step, beyond what was there before."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = Llama(SIZE)
    model = fxshard.compile(plain, precision=BF16, optimizer=fxshard.AdamW(lr=1e-4), memory_budget=budget, **options)
    del plain
    losses = []
    for step in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        x = tokens(step)
        loss = model(x, x)
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        losses.append(float(loss))
        model.optimizer.step()
        model.optimizer.zero_grad()
    return model.schedule, losses, peak


@pytest.mark.shows("M1", "M3", "M4")
def test_budgets_are_kept_and_predicted() -> None:
    run(None)  # products and attention allocate workspaces of their own, once in a process
    schedule, losses, peak = run(None)
    assert peak == pytest.approx(schedule.step_bytes, rel=0.03)
    with torch.device("meta"):
        model = Llama(SIZE)
        batch = torch.empty(4, 1024, dtype=torch.int64)
    with pytest.raises(fxshard.BudgetError) as caught:
        options = {"world_size": 1, "hardware": "h200", "precision": BF16, "optimizer": fxshard.AdamW()}
        fxshard.plan(model, (batch, batch), memory_budget=1, **options)  # type: ignore[arg-type]
    least = int(caught.value.smallest * 1.01)
    for budget in (least, (least + schedule.peak_bytes) // 2):
        under, again, measured = run(budget)
        assert under.recomputed or under.offloaded
        assert measured <= budget
        assert measured == pytest.approx(under.step_bytes, rel=0.03)
        assert again == pytest.approx(losses, rel=1e-3)  # Inductor rounds less between nodes that it fuses
