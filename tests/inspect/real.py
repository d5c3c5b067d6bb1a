"""Schedules that the planner makes, small, of every kind that rules differ for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

import fxshard
from tests.expert_parallel import plan_of
from tests.parallel_muon import planned
from tests.pool import Pool
from tests.precision.nets import net
from tests.precision.test_experts import moe
from tests.stack import batch, deep, wide, wide_batch
from tests.test_groups import DIM, TOKENS, Moe
from tests.training import with_debug

ADAMW = fxshard.AdamW(lr=1e-3)
MUON = fxshard.Muon(lr=1e-2, adamw=ADAMW)


@cache
def _stack(zero: int, ranks: int = 2, shards: int | None = None, own: bool = True) -> fxshard.Schedule:
    options: dict[str, Any] = {"optimizer": ADAMW if own else None, "zero": zero, "shard_size": shards}
    return fxshard.plan(deep(), batch(0, 0), world_size=ranks, lowering="eager", **options)


def _frozen() -> fxshard.Schedule:
    model = deep()
    model.layers[1].requires_grad_(False)
    return fxshard.plan(model, batch(0, 0), world_size=2, lowering="eager")


def _evaluation() -> fxshard.Schedule:
    model = deep().requires_grad_(False)
    return fxshard.plan(model, batch(0, 0), world_size=2, lowering="eager")


def _muon(layout: Any, zero: int = 3, optimizer: fxshard.Muon = MUON) -> fxshard.Schedule:
    options: dict[str, Any] = {"optimizer": optimizer, "layout": layout, "zero": zero}
    return fxshard.plan(wide(), wide_batch(0, 0), world_size=2, lowering="eager", **options)


def _mxfp8(zero: int) -> fxshard.Schedule:
    x = torch.zeros(2, 8, dtype=torch.int64)
    options = {"precision": fxshard.MXFP8(), "lowering": "eager", "optimizer": ADAMW}
    return fxshard.plan(net(), (x, x), world_size=2, zero=zero, **with_debug(options))


def _experts() -> fxshard.Schedule:
    """Experts on other ranks than the rest, with a divisor and a process group of their own."""
    with torch.device("meta"):
        model, inputs = Moe(), (torch.empty(TOKENS, DIM), torch.empty(TOKENS, DIM))
    return fxshard.plan(model, inputs, world_size=4, groups={"*.experts.*": 2}, lowering="eager")


def _quantized_experts() -> fxshard.Schedule:
    x = torch.zeros(2, 16, dtype=torch.int64)
    return fxshard.plan(moe(), (x, x), world_size=2, zero=3, precision=fxshard.MXFP8(), lowering="eager")


def _expert_parallel() -> fxshard.Schedule:
    """A model that communicates itself: tokens go to their experts and back."""
    return plan_of(3)


def _tensor_parallel() -> fxshard.Schedule:
    """Muon's matrices are cut over tensor-parallel ranks; one lies on several data-parallel ranks, too."""
    with Pool() as apart:
        return fxshard.Schedule.from_json(apart(1, planned, "rows")[0])


def _offloading() -> fxshard.Schedule:
    """All that can be on the host between forward and backward is there."""
    options: dict[str, Any] = {"world_size": 2, "lowering": "eager", "optimizer": ADAMW, "activations": "offload"}
    with pytest.raises(fxshard.BudgetError) as caught:
        fxshard.plan(deep(), batch(0, 0), memory_budget=1, **options)
    return fxshard.plan(deep(), batch(0, 0), memory_budget=caught.value.smallest, **options)


_MAKE: dict[str, Callable[[], fxshard.Schedule]] = {
    "zero 0": partial(_stack, 0),
    "zero 1": partial(_stack, 1),
    "zero 2": partial(_stack, 2),
    "zero 3": partial(_stack, 3),
    "zero 3, torch's optimizer": partial(_stack, 3, own=False),
    "one rank": partial(_stack, 3, ranks=1),
    "hsdp": partial(_stack, 3, ranks=4, shards=2),
    "no_sync": lambda: _stack(3).accumulating(),
    "frozen": _frozen,
    "evaluation": _evaluation,
    "muon by rows": partial(_muon, "rows"),
    "muon whole": partial(_muon, "whole", zero=1),
    "normuon by rows": partial(_muon, "rows", optimizer=fxshard.NorMuon(lr=1e-2, adamw=ADAMW)),
    "mxfp8 staged": partial(_mxfp8, 2),
    "mxfp8 direct": partial(_mxfp8, 3),
    "experts on ranks of their own": _experts,
    "mxfp8 experts": _quantized_experts,
    "expert parallel": _expert_parallel,
    "muon, tensor parallel": _tensor_parallel,
    "activations on the host": _offloading,
}
SCHEDULES = {name: cache(make) for name, make in _MAKE.items()}
"""Planned when first asked for; a schedule does not change."""
