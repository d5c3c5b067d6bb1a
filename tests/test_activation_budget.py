"""A memory budget covers activations: what backward computes again, what that costs, and that no bit changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.frontend.planning import sweep
from fxshard.planner.hardware import PRESETS, Hardware
from fxshard.schedule.peak import Thing
from fxshard.schedule.schedule import Schedule
from tests.measuring import AllocatedPeak, NewBytes
from tests.pool import Pool
from tests.test_budget import captured
from tests.thorough import thorough
from tests.toy import Llama, batch
from tests.training import VOCAB as LARGE
from tests.training import full_gradients, train_step

VOCAB = 64
SLOW = replace(PRESETS["h200"], name="slow", intra_bandwidth=2e9, inter_bandwidth=1e9)


def small() -> Llama:
    torch.manual_seed(0)
    return Llama(vocab=VOCAB, dim=64, layers=2, heads=4, hidden=176)


def data(step: int = 0, ranks: int = 2, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(step, ranks, rank, VOCAB, size=4, length=64)


def planned(model: nn.Module, **options: Any) -> Schedule:
    settings = {"world_size": 2, "hardware": "cpu", "lowering": "eager", "optimizer": fxshard.AdamW(), **options}
    return fxshard.plan(model, data(), **settings)


def too_small(model: nn.Module, **options: Any) -> fxshard.BudgetError:
    with pytest.raises(fxshard.BudgetError) as caught:
        planned(model, memory_budget=1, **options)
    return caught.value


@cache
def refused() -> fxshard.BudgetError:
    return too_small(Marked())


@cache
def tightest() -> Schedule:
    """What fits into the smallest budget that does."""
    return planned(Marked(), memory_budget=refused().smallest)


@pytest.mark.shows("M2")
@pytest.mark.parametrize(
    ("optimizer", "others"),
    [
        (fxshard.AdamW(), ['fxshard.AdamW(state="8bit")', 'fxshard.AdamW(offload="host")']),
        thorough(fxshard.Muon(), ['fxshard.Muon(state="8bit")', 'fxshard.Muon(offload="host")']),
        (fxshard.AdamW(state="8bit"), ['fxshard.AdamW(state="8bit", offload="host")']),
        thorough(fxshard.AdamW(offload="host"), []),
    ],
    ids=["AdamW", "Muon", "8bit", "host"],
)
def test_an_error_says_what_other_optimizer_state_would_do(optimizer: Any, others: list[str]) -> None:
    """As a plan with what it says to write gives it."""
    model = Marked(layers=1)
    error = too_small(model, optimizer=optimizer, hardware="h200")
    assert list(error.with_state) == others
    for choice, least in error.with_state.items():
        assert least < error.smallest and f"with optimizer={choice} {least} bytes" in str(error)
        assert too_small(model, optimizer=eval(choice), hardware="h200").smallest == least


def test_an_error_promises_nothing_that_is_refused() -> None:
    """The host of a CPU is the CPU, and state in fewer bits is for masters in fp32."""
    model = Marked(layers=1)
    assert list(too_small(model).with_state) == ['fxshard.AdamW(state="8bit")']
    assert too_small(model.bfloat16(), hardware="h200").with_state == {}


# -- what is decided ---------------------------------------------------------------------------------------------------


@pytest.mark.shows("M2")
@pytest.mark.parametrize(
    ("name", "ranks", "machine"), [("llama", 2, SLOW), thorough("wide", 64, PRESETS["h200"])], ids=["llama", "wide"]
)
def test_more_memory_is_never_a_slower_step(name: str, ranks: int, machine: Hardware) -> None:
    def under(budget: int | None) -> Schedule:
        return captured(name).schedule(ranks=ranks, hardware=machine, memory_budget=budget, optimizer=fxshard.AdamW())

    with pytest.raises(fxshard.BudgetError) as caught:
        under(1)
    free = under(None)
    least, most = caught.value.smallest, free.peak_bytes
    found = [under(least + (most - least) * i // 3) for i in (0, 1, 4)]
    steps = [schedule.simulate(machine).step_seconds for schedule in found]
    assert all(tight >= loose for tight, loose in pairwise(steps)), steps
    assert steps[0] == caught.value.seconds
    assert found[0].recomputed and not found[-1].recomputed
    assert steps[-1] <= free.simulate(machine).step_seconds


@pytest.mark.thorough
@pytest.mark.shows("M2")
def test_a_launch_less_does_not_hide_what_computes_more() -> None:
    """The saved results of layer norms cut backward once more: a split without them is faster by a launch, whatever the
    budget, and is found although the one before it fits."""
    with pytest.raises(fxshard.BudgetError) as error:
        captured("layer norms").schedule(ranks=2, hardware=SLOW, memory_budget=1)
    budgets = [error.value.smallest + extra for extra in (0, 10_000, 30_000, 1_000_000)]
    found = [captured("layer norms").schedule(ranks=2, hardware=SLOW, memory_budget=budget) for budget in budgets]
    steps = [schedule.simulate(SLOW).step_seconds for schedule in found]
    assert all(tight >= loose for tight, loose in pairwise(steps)), steps


@pytest.mark.shows("M1")
def test_an_infeasible_budget_names_the_smallest_and_its_step() -> None:
    error, schedule = refused(), tightest()
    assert schedule.peak_bytes == error.smallest
    assert schedule.simulate("cpu").step_seconds == error.seconds
    assert f"at least {error.smallest} bytes" in str(error) and "simulated step" in str(error)
    with pytest.raises(fxshard.BudgetError):
        planned(Marked(), memory_budget=error.smallest - 1)


@pytest.mark.shows("M2")
def test_a_sweep_has_the_budgets_from_which_a_step_is_faster() -> None:
    trades = sweep(Marked(), data(), world_size=2, hardware="cpu", lowering="eager", optimizer=fxshard.AdamW())
    assert all(a.bytes < b.bytes and a.seconds > b.seconds for a, b in pairwise(trades))
    first, last = tightest(), planned(Marked(), memory_budget=trades[-1].bytes)
    assert trades[0].recomputed == first.recomputed and trades[0].bytes == first.peak_bytes
    assert [each.simulate("cpu").step_seconds for each in (first, last)] == [trades[0].seconds, trades[-1].seconds]


@pytest.mark.thorough
@pytest.mark.shows("M2")
def test_nothing_that_a_budget_leaves_untried_is_faster() -> None:
    """A sweep tries every split in every arena, a budget only what may be faster than the best so far."""
    inputs = batch(0, 2, 0, LARGE)
    torch.manual_seed(0)
    model = Llama(vocab=LARGE, dim=32, layers=3, heads=4, hidden=88)
    trades = sweep(model, inputs, world_size=2, hardware=SLOW, lowering="eager", optimizer=fxshard.AdamW())
    assert any(trade.offloaded for trade in trades) and any(trade.recomputed for trade in trades)
    for trade in trades[::3]:
        options = {"ranks": 2, "hardware": SLOW, "memory_budget": trade.bytes, "optimizer": fxshard.AdamW()}
        found = captured("llama").schedule(**options).simulate(SLOW).step_seconds
        assert found == pytest.approx(trade.seconds, rel=1e-12), trade


def test_layers_are_decided_alike_and_the_table_says_what_is_computed_again() -> None:
    schedule = tightest()
    names = [each.name for each in schedule.recomputed]
    assert not schedule.offloaded, "a CPU has no other memory, unless it is asked for"
    assert any(name.startswith("layers.*.") for name in names)
    assert {each.count for each in schedule.recomputed if each.name.startswith("layers.*")} == {3}
    assert f"computed again in backward: {names[0]}" in str(schedule)
    assert schedule.saved_bytes < planned(Marked()).saved_bytes
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.thorough
def test_folded_layers_are_decided_alike() -> None:
    """Five of nine are traced; what is decided about them holds for all, and every layer saves as much less."""
    model = Marked(layers=9)
    roomy = planned(model)
    tight = planned(model, memory_budget=roomy.peak_bytes - 50_000)
    assert tight.recomputed and {each.count for each in tight.recomputed} == {5}
    per_layer = sum(each.bytes for each in tight.recomputed) // 5
    assert roomy.saved_bytes - tight.saved_bytes == 9 * per_layer


class Marked(nn.Module):
    """Layers that the model itself computes again, or that draw random numbers."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(layers)
        )
        self.head = nn.Linear(32, VOCAB)
        self.dropout, self.checkpointed = dropout, checkpointed

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(layer(x), self.dropout) if self.dropout else x + layer(x)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(x)
        for layer in self.layers:
            if self.checkpointed:
                hidden = checkpoint(self.block, layer, hidden, use_reentrant=False)
            else:
                hidden = self.block(layer, hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def test_what_the_model_checkpoints_is_left_to_it() -> None:
    """Its regions are computed again as it says, and nothing of them is decided a second time."""
    model = Marked(checkpointed=True)
    schedule = planned(model, memory_budget=too_small(model).smallest)
    assert not any(each.name.startswith("layers") for each in schedule.recomputed)
    assert tightest().recomputed, "where it says nothing"


# -- what a run does ---------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What one rank saw: the schedule, losses, gradients of the last step, and what it had allocated at its peak."""

    schedule: Schedule
    losses: list[float]
    grads: dict[str, torch.Tensor]
    peak: int
    largest: tuple[Thing, ...]


def trained(make: str, budgets: list[int | None]) -> list[Trained]:
    found = []
    for budget in budgets:
        new = NewBytes()
        model = fxshard.compile(
            small() if make == "llama" else Marked(0.3),
            lowering="eager",
            optimizer=fxshard.AdamW(),
            memory_budget=budget,
        )
        torch.manual_seed(dist.get_rank())
        losses = []
        for step in range(2):
            losses.append(float(train_step(model, *data(step, dist.get_world_size(), dist.get_rank()))))
        last = data(2, dist.get_world_size(), dist.get_rank())
        before = new.count()
        with AllocatedPeak() as peak:
            loss = model(*last)
            loss.backward()
        losses.append(float(loss.detach()))
        found.append(Trained(model.schedule, losses, full_gradients(model), before + peak.bytes, model.report.largest))
        del model, loss
    return found


def budgets(model: nn.Module, ranks: int) -> list[int | None]:
    return [None, too_small(model, world_size=ranks).smallest]


@pytest.fixture(scope="module")
def ran(ranks: Pool) -> list[list[Trained]]:
    """On one rank: to reduce between CPUs takes memory of its own, which no device needs."""
    return list(ranks(1, trained, "llama", budgets(small(), 1), timeout=240))


@pytest.mark.shows("M4")
def test_recomputed_and_kept_give_the_same_bits(ran: list[list[Trained]]) -> None:
    for kept, *others in ran:
        assert not kept.schedule.recomputed and others[0].schedule.recomputed
        for run in others:
            assert run.losses == kept.losses
            assert all(torch.equal(run.grads[name], kept.grads[name]) for name in kept.grads)


@pytest.mark.shows("M1")
def test_the_measured_peak_keeps_to_the_budget(ran: list[list[Trained]]) -> None:
    for runs in ran:
        for run in runs[1:]:
            assert run.schedule.budget is not None
            assert run.peak <= run.schedule.budget, (run.peak, run.schedule.budget, len(run.schedule.recomputed))


@pytest.mark.shows("M3")
def test_the_predicted_peak_is_the_measured_one(ran: list[list[Trained]]) -> None:
    for runs in ran:
        for run in runs:
            assert run.peak == pytest.approx(run.schedule.step_bytes, rel=0.03), len(run.schedule.recomputed)


def test_the_report_names_the_largest_things(ran: list[list[Trained]]) -> None:
    for kept, tight, *_ in ran:
        sizes = [thing.bytes for thing in kept.largest]
        assert len(sizes) == 10 and sizes == sorted(sizes, reverse=True)
        assert sum(sizes) <= kept.schedule.peak_bytes
        names = {thing.name for thing in kept.largest}
        assert {"masters and optimizer state", "parameters", "gradients"} <= names
        saved = {each.name for each in tight.schedule.recomputed}
        assert names & saved, "what is computed again was among the largest"


@pytest.mark.thorough
@pytest.mark.shows("M4")
def test_random_numbers_are_drawn_once(ranks: Pool) -> None:
    """Dropout is never computed again: the seeded run is the same with and without a budget."""
    for kept, *others in ranks(1, trained, "dropout", budgets(Marked(0.3), 1)):
        assert others[0].schedule.recomputed
        for run in others:
            assert run.losses == kept.losses
            assert all(torch.equal(run.grads[name], kept.grads[name]) for name in kept.grads)
