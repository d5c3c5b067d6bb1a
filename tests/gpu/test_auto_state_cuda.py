"""Optimizer state that a budget decides about, on a GPU: peaks are below it, updates included, and losses the same."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.planner.hardware import hardware
from fxshard.planner.kept_state import kept_state

pytestmark = pytest.mark.gpu
SIZE = LlamaConfig(vocab=8192, dim=1024, layers=8, heads=8, hidden=2816)
BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)
STEPS = 3
LR = 1e-4


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, SIZE.vocab, (4, 1024), generator=torch.Generator().manual_seed(step)).cuda()


def run(optimizer: fxshard.AdamW, budget: int | None) -> tuple[fxshard.ShardedModule, list[float], int]:
    """The model, losses, and the peak of whole steps after the first, beyond what was there before."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = Llama(SIZE)
    model = fxshard.compile(plain, precision=BF16, optimizer=optimizer, memory_budget=budget)
    del plain
    losses = []
    for step in range(STEPS):
        if step == 1:  # the first allocates workspaces
            torch.cuda.reset_peak_memory_stats()
        x = tokens(step)
        loss = model(x, x)
        loss.backward()
        losses.append(float(loss))
        model.optimizer.step()
        model.optimizer.zero_grad()
    torch.cuda.synchronize()
    return model, losses, torch.cuda.max_memory_allocated() - before


def smallest(optimizer: fxshard.AdamW) -> int:
    with torch.device("meta"):
        model = Llama(SIZE)
        batch = torch.empty(4, 1024, dtype=torch.int64)
    options: dict[str, Any] = {"world_size": 1, "hardware": "h200", "precision": BF16, "optimizer": optimizer}
    with pytest.raises(fxshard.BudgetError) as caught:
        fxshard.plan(model, (batch, batch), memory_budget=1, **options)
    return int(caught.value.smallest * 1.01)


@pytest.mark.shows("M1", "M5")
def test_moments_go_to_the_host_as_a_budget_needs_it() -> None:
    fixed = fxshard.AdamW(lr=LR)
    run(fixed, None)  # workspaces, once in a process
    model, losses, _ = run(fixed, None)
    roomy = model.schedule.peak_bytes
    del model
    auto = fxshard.AdamW(lr=LR, offload="auto")
    least, most = smallest(auto), smallest(fixed)
    found = []
    for budget in (least, (least + most) // 2, roomy):
        model, again, peak = run(auto, budget)
        state = kept_state(model.schedule.buckets, hardware("h200"))
        assert peak <= budget, (peak, budget, str(state))
        assert model.bytes_at_rest().get("host", 0) == state.host_bytes
        assert again == pytest.approx(losses, rel=1e-3)  # Inductor rounds less between nodes that it fuses
        found.append(state.on_host)
        del model
    assert found[0] >= found[1] > 0


@pytest.mark.shows("M1")
def test_fewer_bits_are_chosen_where_that_is_faster() -> None:
    auto = fxshard.AdamW(lr=LR, state="auto")
    model, _, peak = run(auto, smallest(fxshard.AdamW(state="8bit")))
    assert {bucket.state for bucket in model.schedule.buckets} == {"8bit"}
    assert model.schedule.budget is not None and peak <= model.schedule.budget
    assert "optimizer state: 8bit on the device" in str(model.report)
