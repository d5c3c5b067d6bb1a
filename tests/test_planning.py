"""What `fxshard.plan` says is what a run does: events, memory, agreement of the ranks; and what it refuses."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.bench.presets import LENGTH, PRESETS
from fxshard.schedule.schedule import Schedule
from tests.measuring import NewBytes
from tests.pool import Pool
from tests.stack import wide, wide_batch
from tests.toy import Linears, Untraceable


def meta_wide() -> nn.Module:
    with torch.device("meta"):
        return wide()


def planned(model: nn.Module, device: str = "cpu", **options: Any) -> Schedule:
    inputs = tuple(value.to(device) for value in wide_batch(0, 0))
    settings = {"world_size": 2, "hardware": "cpu", "lowering": "eager", "optimizer": fxshard.AdamW(), **options}
    return fxshard.plan(model, inputs, **settings)


def smallest_budget() -> int:
    with pytest.raises(fxshard.BudgetError) as caught:
        planned(meta_wide(), "meta", memory_budget=1)
    return caught.value.smallest


# -- P2, P3, P5: what a run does ---------------------------------------------------------------------------------------


def trained(settings: list[dict[str, Any]]) -> list[tuple[Schedule, int]]:
    """The schedule of each setting, and what this rank holds at the end of a backward behind an optimizer step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    found = []
    for options in settings:
        new = NewBytes()
        plain = wide()
        batches = [wide_batch(step, dist.get_rank()) for step in range(2)]
        model = fxshard.compile(plain, lowering="eager", mesh=mesh, optimizer=fxshard.AdamW(), **options)
        model(*batches[0]).backward()
        model.optimizer.step()  # its state exists from here on
        model.optimizer.zero_grad()
        model(*batches[1]).backward()
        del batches
        found.append((model.schedule, new.count()))
        del model
    return found


Ran = list[tuple[dict[str, Any], list[tuple[Schedule, int]]]]


@pytest.fixture(scope="module")
def ran(ranks: Pool) -> Ran:
    """[(options, what each of two ranks found)]"""
    settings: list[dict[str, Any]] = [{"zero": zero} for zero in range(4)]
    settings.append({"zero": 3, "memory_budget": smallest_budget() + 100_000})
    return list(zip(settings, zip(*ranks(2, trained, settings), strict=True), strict=True))


@pytest.mark.shows("P2", "P5")
def test_plan_gives_the_events_of_the_run(ran: Ran) -> None:
    """On every rank, which therefore have one digest."""
    for options, found in ran:
        plan = planned(meta_wide(), "meta", **options)
        for schedule, _ in found:
            assert plan.events == schedule.events, options
            assert plan.digest == schedule.digest
            assert plan == schedule  # buckets, arena, ranks, budget


@pytest.mark.shows("P2")
def test_plan_of_a_model_with_weights(ran: Ran) -> None:
    options, found = ran[3]
    assert planned(wide(), **options) == found[0][0]


@pytest.mark.shows("P3")
def test_arena_and_shards_are_what_a_rank_holds(ran: Ran) -> None:
    for options, found in ran:
        for schedule, held in found:
            predicted = schedule.resident_bytes + schedule.arena_bytes
            # A number per bucket, to find changes that leave no trace, and one per parameter: who was stepped.
            extra = sum(8 + 4 * len(bucket.params) for bucket in schedule.buckets)
            assert held - extra <= predicted <= held * 1.02, f"{options}: {predicted} bytes predicted, {held} held"


class Skips(Linears):
    """Uses one layer less on the last rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: 3 if dist.get_rank() < dist.get_world_size() - 1 else 2]:
            x = layer(x)
        return x.sum()


def launched_before_divergence() -> tuple[str, list[str]]:
    """The error, and the collectives on parameters or gradients that this rank had started by then."""
    model = fxshard.compile(Skips(), zero=3, lowering="eager")
    engine, launched = model._sharding.engine, []
    for part, name in ((engine, "unshard"), (engine.gradients, "reduce")):
        original = getattr(part, name)
        setattr(part, name, lambda *args, name=name, run=original: (launched.append(name), run(*args))[1])
    try:
        model(torch.ones(2, 8)).backward()
    except fxshard.RankDivergenceError as error:
        return str(error), launched
    return "", launched


@pytest.mark.shows("P5")
def test_a_difference_is_an_error_on_all_ranks_before_the_first_collective(ranks: Pool) -> None:
    for message, launched in ranks(3, launched_before_divergence, timeout=60):
        assert "forward unshard layers.2" in message
        assert not launched


def test_verifying_is_a_small_part_of_planning() -> None:
    """And of compiling, which takes longer still."""
    started = time.process_time()
    schedule = planned(meta_wide(), "meta", debug=fxshard.Debug(verify=False))
    planning = time.process_time() - started
    started = time.process_time()
    schedule.verify()
    assert time.process_time() - started < planning / 20


# -- planning needs nothing --------------------------------------------------------------------------------------------


def test_a_model_on_meta_needs_no_memory() -> None:
    model, inputs = PRESETS["llama-8b"](2)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    planned(meta_wide(), "meta")  # what torch loads on first use is not the plan's
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model.eval().train()
    schedule = fxshard.plan(model, inputs, world_size=1024)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown < weights / 20, f"{grown} bytes for a model of {weights}"
    assert schedule.ranks == 1024
    assert all(p.is_meta and p.grad is None for p in model.parameters())
    assert all(value.is_meta and value.shape == (1, LENGTH) for value in inputs)
    assert model.training


def test_planning_changes_nothing_of_the_model() -> None:
    model = wide().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    schedule = planned(model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert planned(model) == schedule  # and it can be planned again
    fxshard.compile(model, lowering="eager")  # and taken apart


def test_inputs_by_name() -> None:
    x, y = wide_batch(0, 0)
    by_name = fxshard.plan(meta_wide(), {"x": x, "y": y}, world_size=2, hardware="cpu", lowering="eager")
    assert by_name == planned(meta_wide(), optimizer=None)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_an_infeasible_budget_states_the_smallest() -> None:
    with pytest.raises(fxshard.BudgetError, match="at least") as caught:
        planned(meta_wide(), memory_budget="1KiB")
    assert caught.value.budget == 1024
    assert str(caught.value.smallest) in str(caught.value)


@pytest.mark.parametrize("world_size", [0, -8, 2.0, "8", None, True])
def test_wrong_world_size(world_size: Any) -> None:
    with pytest.raises(fxshard.ConfigError, match="world_size"):
        planned(meta_wide(), world_size=world_size)


@pytest.mark.parametrize("budget", ["lots", "-1", "0", 0, -5, "60XiB"])
def test_wrong_budget(budget: Any) -> None:
    with pytest.raises(fxshard.ConfigError, match="memory_budget"):
        planned(meta_wide(), memory_budget=budget)


def test_a_model_without_parameters() -> None:
    with pytest.raises(fxshard.ConfigError, match="no parameters"):
        fxshard.plan(nn.ReLU(), (torch.ones(2),), world_size=2)


def test_below_the_meta_device() -> None:
    """Where people make the model. It would give an empty schedule."""
    with torch.device("meta"), pytest.raises(fxshard.ConfigError, match="after that block"):
        fxshard.plan(nn.Linear(4, 4), (torch.empty(2, 4),), world_size=2)


def test_a_model_that_is_sharded_already() -> None:
    """Its parameters have no memory: looking at them would be the end of the process."""
    plain = nn.Linear(4, 4)
    sharded = fxshard.shard(plain)
    for model in (sharded, plain):
        with pytest.raises(fxshard.StateError, match="plan the plain module"):
            fxshard.plan(model, (torch.ones(2, 4),), world_size=2)


def test_an_untraceable_model() -> None:
    with pytest.raises(fxshard.CaptureError, match=r"Untraceable\.forward"):
        fxshard.plan(Untraceable(), (torch.ones(2, 4),), world_size=2)
