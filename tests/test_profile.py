"""Recorded durations: the same on all ranks, used in place of estimates, and no result changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxshard
from fxshard.schedule.events import Kind, Phase
from tests.pool import Pool
from tests.stack import Stack, batch
from tests.training import EPS, Run, full_gradients, sharded_run


@dataclass
class Profiled:
    profile: fxshard.Profile
    before: fxshard.Schedule
    after: fxshard.Schedule
    compiled: tuple[int, int]
    run: Run
    reference: Run


def profiled() -> Profiled:
    """Five steps, of which the second and third are recorded; the last two run on the new schedule."""
    model = fxshard.compile(Stack(), optimizer=fxshard.AdamW(lr=1e-3, eps=EPS), lowering="eager")
    losses = []

    def step(number: int) -> None:
        model.optimizer.zero_grad()
        loss = model(*batch(number, dist.get_rank()))
        loss.backward()
        value = loss.detach().clone().double()
        dist.all_reduce(value)
        losses.append(float(value / dist.get_world_size()))
        if number < 4:
            model.optimizer.step()

    step(0)
    before, compiled = model.schedule, model.report.compilations.compiled
    with model.profile(steps=2) as profile:
        step(1)
        step(2)
    slow = {key: seconds * (1000 if key[0] == "gather" else 1) for key, seconds in profile.seconds.items()}
    model.reschedule(replace(profile, seconds=slow))
    step(3)
    step(4)
    grads = full_gradients(model)
    model.optimizer.step()
    run = Run(losses, grads, model.full_state_dict())
    reference = sharded_run(Stack, steps=5)
    return Profiled(profile, before, model.schedule, (compiled, model.report.compilations.compiled), run, reference)


@pytest.fixture(scope="module")
def found(ranks: Pool) -> list[Profiled]:
    return ranks(2, profiled)


def test_ranks_have_the_same_profile(found: list[Profiled]) -> None:
    first, second = found
    assert first.profile == second.profile
    assert first.after == second.after


def test_everything_is_recorded(found: list[Profiled]) -> None:
    """Each stretch of compute and each collective of forward and backward has a duration, and all are plausible."""
    profile, schedule = found[0].profile, found[0].before
    durations = profile.of(schedule)
    timed = [
        i
        for i, event in schedule.of(Kind.COMPUTE, Kind.UNSHARD, Kind.REDUCE)
        if event.phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    assert sorted(durations) == timed
    assert all(0 < seconds < 60 for seconds in durations.values())


@pytest.mark.shows("S3")
def test_no_bit_changes(found: list[Profiled]) -> None:
    for each in found:
        assert each.run.same(each.reference)


def test_nothing_is_compiled_again(found: list[Profiled]) -> None:
    for each in found:
        assert each.compiled[0] == each.compiled[1]
        assert each.after.digest == each.before.digest


def lead(schedule: fxshard.Schedule) -> int:
    """Events between the start of each gather and its wait, added up."""
    started: dict[int, int] = {}
    total = 0
    for i, event in schedule.of(Kind.UNSHARD, Kind.WAIT):
        if event.kind is Kind.UNSHARD:
            started[event.bucket_index] = i
        else:
            total += i - started.get(event.bucket_index, i)
    return total


def planned(profile: fxshard.Profile, gathers: float) -> fxshard.Schedule:
    """The plan for a machine whose gathers take that many times as long."""
    seconds = {key: value * (gathers if key[0] == "gather" else 1) for key, value in profile.seconds.items()}
    with torch.device("meta"):
        model = Stack()
    scaled = replace(profile, seconds=seconds)
    settings: dict[str, Any] = {"hardware": "cpu", "lowering": "eager", "optimizer": fxshard.AdamW()}
    return fxshard.plan(model, batch(0, 0), world_size=2, profile=scaled, **settings)


@pytest.mark.thorough
@pytest.mark.shows("P2")
def test_plan_and_simulation_take_a_profile(found: list[Profiled]) -> None:
    profile, before = found[0].profile, found[0].before
    same = fxshard.Profile.from_json(profile.to_json())
    assert same == profile
    slow = planned(profile, 1000)
    assert slow == found[0].after
    assert lead(planned(profile, 1e-6)) < lead(slow)  # what takes longer starts earlier
    simulated = before.simulate("cpu", durations=profile)
    recorded = sum(s for i, s in profile.of(before).items() if before.events[i].kind is Kind.COMPUTE)
    updates = simulated.compute_seconds - recorded
    assert 0 < updates < 1
    assert simulated.step_seconds != before.simulate("cpu").step_seconds


def test_what_is_refused(found: list[Profiled]) -> None:
    profile = found[0].profile
    with pytest.raises(fxshard.ConfigError, match="another schedule"):
        fxshard.plan(
            Stack(), batch(0, 0), world_size=2, hardware="cpu", lowering="eager", zero=2, profile=profile,
        )  # fmt: skip
    for text in ("", "{}", '{"fxshard_profile": 7}', '{"fxshard_profile": 1, "seconds": [[1]], "structure": {}}'):
        with pytest.raises(fxshard.ConfigError):
            fxshard.Profile.from_json(text)
    model = fxshard.compile(Stack(), lowering="eager")
    with pytest.raises(fxshard.ConfigError, match="empty"):
        model.reschedule(fxshard.Profile())
    with pytest.raises(fxshard.ConfigError, match="at least one"), model.profile(steps=0):
        pass
    with pytest.raises(fxshard.StateError, match="sharded, not compiled"):
        fxshard.shard(Stack(), lowering="eager").reschedule(profile)
