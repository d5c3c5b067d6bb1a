"""Activations on the host between forward and backward: the same bits, less memory, in every kind of loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.bench.captured import capture
from fxshard.frontend.planning import sweep
from fxshard.schedule.events import Kind
from fxshard.schedule.schedule import Schedule
from tests.measuring import AllocatedPeak, NewBytes
from tests.pool import Pool
from tests.test_activation_budget import VOCAB, Marked, data, too_small
from tests.toy import Llama
from tests.training import Make, full_gradients

LAYERS = 3


class Checkpointed(Marked):
    """One of four layers is computed again by the model itself."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS + 1)

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False) if layer is self.layers[1] else super().block(layer, x)


def llama() -> nn.Module:
    torch.manual_seed(0)
    return Llama(vocab=VOCAB, dim=64, layers=LAYERS, heads=4, hidden=176)


@cache
def least(make: Make = llama, ranks: int = 2) -> int:
    """The smallest budget for which nothing is computed again."""
    return too_small(make(), activations="offload", world_size=ranks).smallest


# -- what is planned ---------------------------------------------------------------------------------------------------


def test_what_is_offloaded_is_in_the_schedule_and_the_peak() -> None:
    captured, budget = capture(llama(), data(), lowering="eager"), least(ranks=1)
    options: dict[str, Any] = {"ranks": 1, "hardware": "cpu", "optimizer": fxshard.AdamW()}
    roomy = captured.schedule(**options)
    schedule = captured.schedule(**options, memory_budget=budget, activations="offload")
    assert not schedule.recomputed and not roomy.offloaded
    names = {each.name: each for each in schedule.offloaded}
    assert names["layers.*.mlp.w1 mm"].count == LAYERS - 1, "the one that backward reads first stays"
    assert schedule.saved_bytes == roomy.saved_bytes - sum(each.bytes for each in schedule.offloaded)
    assert schedule.peak_bytes == budget < roomy.peak_bytes
    counts = {
        kind: sum(1 for _ in schedule.of(kind)) for kind in (Kind.OFFLOAD, Kind.RELEASE, Kind.RELOAD, Kind.RESTORE)
    }
    assert set(counts.values()) == {sum(each.count for each in schedule.offloaded)}
    assert schedule.host_bytes == schedule.offloaded_bytes >= sum(each.bytes for each in schedule.offloaded)
    assert "on the host from forward to backward: " in str(schedule)
    assert Schedule.from_json(schedule.to_json()) == schedule
    schedule.accumulating().verify()
    stretches = [{event.why for _, event in each.of(Kind.COMPUTE)} for each in (roomy, schedule)]
    assert len(stretches[1]) <= len(stretches[0]) + 2 * LAYERS, "a stretch ends at a reshard or at a copy, not at both"


@pytest.mark.thorough
def test_a_fast_link_is_used_in_place_of_computing_again() -> None:
    """With the host a smaller budget works, and no budget gives a slower step."""
    options = {"hardware": "gb200", "lowering": "eager", "world_size": 2, "optimizer": fxshard.AdamW()}
    model = Marked(layers=4)
    alone = sweep(model, data(), **options, activations="recompute")
    trades = sweep(model, data(), **options)
    assert not any(trade.offloaded for trade in alone) and any(trade.offloaded for trade in trades)
    assert trades[0].bytes < alone[0].bytes
    for trade in alone:
        assert min(each.seconds for each in trades if each.bytes <= trade.bytes) <= trade.seconds


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"activations": "host"}, "expected one of 'auto', 'recompute', 'offload'"),
        ({"activations": "offload"}, "give memory_budget="),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(fxshard.ConfigError, match=says):
        fxshard.compile(llama(), **options)


# -- what a run does ---------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What one rank saw."""

    schedule: Schedule
    losses: list[float]
    grads: dict[str, torch.Tensor]
    peak: int
    host: int
    report: str


def trained(budget: int | None, make: Make) -> Trained:
    """Micro-batches that are kept, steps, an evaluation, and two forwards before their backwards."""
    options = {} if budget is None else {"memory_budget": budget, "activations": "offload"}
    new = NewBytes()
    model = fxshard.compile(make(), lowering="eager", optimizer=fxshard.AdamW(), **options)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    losses: list[float] = []

    def forward(step: int) -> torch.Tensor:
        loss = model(*data(step, ranks, rank))
        losses.append(float(loss.detach()))
        return loss

    for step in range(2):
        with model.no_sync():
            forward(step).backward()
        forward(step + 10).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
    with torch.no_grad():
        forward(20)
    first, second = forward(21), forward(22)
    first.backward()
    second.backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
    del first, second
    before = new.count()
    with AllocatedPeak() as peak:
        forward(23).backward()
    host = model._sharding.engine.offloads.bytes
    return Trained(model.schedule, losses, full_gradients(model), before + peak.bytes - host, host, str(model.report))


def both(budget: int, make: Make) -> tuple[Trained, Trained]:
    return trained(None, make), trained(budget, make)


def assert_same(kept: Trained, run: Trained) -> None:
    assert run.schedule.offloaded and not kept.schedule.offloaded
    assert run.losses == kept.losses
    assert all(torch.equal(run.grads[name], kept.grads[name]) for name in kept.grads)


@pytest.mark.thorough
@pytest.mark.shows("M4")
def test_results_are_the_same_bits(ranks: Pool) -> None:
    for kept, run in ranks(2, both, least(Checkpointed), Checkpointed, timeout=240):
        assert_same(kept, run)
        assert "on the host from forward to backward: " in run.report


@pytest.mark.shows("M1", "M3", "M4")
def test_memory_is_given_back_and_the_peak_is_as_predicted(ranks: Pool) -> None:
    """On one rank: to reduce between CPUs takes memory of its own, which no device needs."""
    ((kept, run),) = ranks(1, both, least(ranks=1), llama, timeout=240)
    assert_same(kept, run)
    assert run.schedule.budget is not None and run.peak <= run.schedule.budget
    assert run.peak == pytest.approx(run.schedule.step_bytes, rel=0.03)
    assert run.peak < kept.peak - 300_000
    assert run.host == 2 * run.schedule.offloaded_bytes, "two forwards waited for their backwards at once"
