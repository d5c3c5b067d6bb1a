"""Optimizer state that a memory budget decides about: its format and its place, together with everything else."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxshard
from fxshard.bench.captured import Captured, capture
from fxshard.frontend.planning import sweep
from fxshard.planner.hardware import PRESETS, Hardware
from fxshard.planner.kept_state import KeptState, kept_state, ways_to_keep
from fxshard.planner.state import FORMATS, StateChoice
from fxshard.runtime.host_memory import untouched_memory
from fxshard.schedule.schedule import Schedule
from tests.pool import Pool
from tests.training import train_step

H200 = PRESETS["h200"]
FAST, SLOW = (replace(H200, name=f"link of {rate:.0e}", host_bandwidth=rate) for rate in (1e15, 1e7))
DIM, LAYERS = 64, 8
HOST, ANY = fxshard.AdamW(lr=1e-2, offload="auto"), fxshard.AdamW(lr=1e-2, state="auto", offload="auto")


class Deep(nn.Module):
    """Many equal buckets, which save something for backward that can be computed again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.mse_loss(self.head(x), y)


def batch(step: int, rank: int, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8 * step + rank)
    return torch.randn(size, DIM, generator=generator), torch.randn(size, 5, generator=generator)


@cache
def captured() -> Captured:
    return capture(Deep(), batch(0, 0), lowering="eager")


def under(budget: int | None, optimizer: Any, machine: Hardware = H200, **options: Any) -> Schedule:
    options = {"ranks": 2, "hardware": machine, "memory_budget": budget, "optimizer": optimizer, **options}
    return captured().schedule(**options)


def refused(optimizer: Any, machine: Hardware = H200, **options: Any) -> fxshard.BudgetError:
    with pytest.raises(fxshard.BudgetError) as caught:
        under(1, optimizer, machine, **options)
    return caught.value


@cache
def smallest(optimizer: Any, machine: Hardware = H200) -> int:
    return refused(optimizer, machine).smallest


def kept(schedule: Schedule, machine: Hardware = H200) -> KeptState:
    return kept_state(schedule.buckets, machine)


# -- the ways to keep state --------------------------------------------------------------------------------------------


def test_ways_are_ordered_by_what_they_cost() -> None:
    """With fp32 first of what costs nothing, and every number of buckets on the host in every format."""
    buckets = under(None, fxshard.AdamW()).buckets
    ways = ways_to_keep(buckets, StateChoice("auto", "auto"), H200)
    assert [str(way) for way in ways[:3]] == [f"{format} on the device" for format in FORMATS]
    assert [way.seconds for way in ways[:3]] == [0, 0, 0]
    assert all(a.seconds <= b.seconds for a, b in pairwise(ways))
    assert sorted((way.format, way.on_host) for way in ways) == sorted(
        (format, count) for format in FORMATS for count in range(len(ways[0].trained) + 1)
    )
    for way in ways:
        sizes = [bucket.moment_bytes for bucket in way.trained]
        on_host = [bucket.moment_bytes for bucket in way.trained if bucket.offload == "host"]
        assert way.device_bytes + way.host_bytes == sum(sizes)
        assert sorted(sizes)[: way.on_host] == sorted(on_host), "the smallest go first"
        moved = sum(bucket.layout.shard_numel for bucket in way.trained if bucket.offload == "host")
        longer = sum(on_host) / H200.host_bandwidth - 7 * 4 * moved / H200.traffic_per_second
        assert way.seconds == pytest.approx(longer, rel=1e-6), "the link takes longer than the updates"


def test_what_is_not_left_to_the_planner_stays() -> None:
    buckets = under(None, fxshard.AdamW()).buckets
    (way,) = ways_to_keep(buckets, StateChoice("bf16", "host"), H200)
    assert str(way) == "bf16 on the host"
    assert {way.format for way in ways_to_keep(buckets, StateChoice("8bit", "auto"), H200)} == {"8bit"}
    assert {way.on_host for way in ways_to_keep(buckets, StateChoice("auto", "none"), H200)} == {0}
    on_cpu = ways_to_keep(buckets, StateChoice("fp32", "auto"), PRESETS["cpu"])
    assert [str(way) for way in on_cpu] == ["fp32 on the device"], "whose memory is the host's"
    halves = tuple(replace(bucket, master_dtype=torch.bfloat16) for bucket in buckets)
    (plain,) = ways_to_keep(halves, StateChoice("auto", "auto"), H200)
    assert plain.buckets == halves


# -- what a budget decides ---------------------------------------------------------------------------------------------


@pytest.mark.shows("M2")
@settings(max_examples=5)
@given(
    optimizer=st.sampled_from([HOST, ANY, fxshard.Muon(offload="auto"), fxshard.NorMuon(state="auto")]),
    machine=st.sampled_from([H200, FAST, SLOW]),
    shares=st.tuples(st.floats(0.0, 1.1), st.floats(0.0, 1.1)),
)
def test_any_feasible_budget_is_kept_and_more_is_never_slower(
    optimizer: Any, machine: Hardware, shares: tuple[float, float]
) -> None:
    least, most = smallest(optimizer, machine), under(None, optimizer, machine).peak_bytes
    steps = []
    for share in sorted(shares):
        budget = least + int((most - least) * share)
        schedule = under(budget, optimizer, machine)
        schedule.verify()
        assert schedule.peak_bytes <= budget
        steps.append(schedule.simulate(machine).step_seconds)
    assert steps[0] >= steps[1] * (1 - 1e-12)


@pytest.mark.shows("M1")
@pytest.mark.parametrize("optimizer", [HOST, ANY], ids=["place", "both"])
def test_the_smallest_budget_counts_what_may_be_chosen(optimizer: fxshard.AdamW) -> None:
    error, fixed = refused(optimizer), refused(fxshard.AdamW())
    assert error.smallest < fixed.smallest
    schedule = under(error.smallest, optimizer)
    assert schedule.peak_bytes == error.smallest and schedule.simulate(H200).step_seconds == error.seconds
    with pytest.raises(fxshard.BudgetError):
        under(error.smallest - 1, optimizer)
    assert not any("auto" in choice for choice in error.with_state)
    assert 'fxshard.AdamW(offload="host")' in fixed.with_state


def test_memory_that_is_there_is_used_for_fp32_on_the_device() -> None:
    for budget in (None, 10**12):
        assert str(kept(under(budget, ANY))) == "fp32 on the device"
    plain, auto = (under(10**12, choice) for choice in (fxshard.AdamW(), ANY))
    assert plain.events == auto.events


def test_what_is_faster_is_taken() -> None:
    """A budget that computing again meets, and moving moments too: the link to the host decides."""
    roomy = under(None, HOST)
    budget = roomy.peak_bytes - (roomy.peak_bytes - smallest(fxshard.AdamW())) // 2
    fast, slow = (under(budget, HOST, machine, activations="recompute") for machine in (FAST, SLOW))
    assert kept(fast).on_host and not fast.recomputed
    assert not kept(slow).on_host and slow.recomputed
    assert kept(fast).on_host < len(kept(fast).trained), "no more than has to be"


def test_fewer_bits_are_taken_only_where_they_are_asked_for() -> None:
    budget = smallest(fxshard.AdamW()) - 10_000
    assert kept(under(budget, HOST)).format == "fp32"
    tight = under(budget, fxshard.AdamW(state="auto"))
    assert kept(tight).format == "bf16" and not kept(tight).on_host, "no fewer than it needs"
    assert kept(under(budget, ANY)).format != "fp32"


@pytest.mark.thorough
@pytest.mark.shows("M2")
def test_a_sweep_goes_on_below_the_fixed_format() -> None:
    options: dict[str, Any] = {"world_size": 2, "hardware": H200, "lowering": "eager"}
    fixed, auto = (sweep(Deep(), batch(0, 0), **options, optimizer=choice) for choice in (fxshard.AdamW(lr=1e-2), ANY))
    assert all(a.bytes < b.bytes and a.seconds >= b.seconds for a, b in pairwise(auto))
    for a, b in pairwise(auto):
        assert a.seconds > b.seconds or FORMATS.index(a.state.split()[0]) > FORMATS.index(b.state.split()[0])
    assert auto[0].bytes == smallest(ANY) < fixed[0].bytes == smallest(fxshard.AdamW(lr=1e-2))
    assert {trade.state for trade in fixed} == {"fp32 on the device"} == {auto[-1].state}
    assert any("on the host" in trade.state for trade in auto) and any("bf16" in trade.state for trade in auto)
    for trade in auto[::4]:
        schedule = under(trade.bytes, ANY)
        assert schedule.peak_bytes <= trade.bytes
        assert schedule.simulate(H200).step_seconds <= trade.seconds * (1 + 1e-12)


def test_a_step_counts_the_link_to_the_host() -> None:
    """Every byte of moments in both directions at once, as was measured: 64 GB of fp32 take 1.2 s on an H200."""
    choices = fxshard.AdamW(), fxshard.AdamW(offload="host"), fxshard.AdamW(state="8bit", offload="host")
    device, host, bits = (under(None, choice, SLOW).simulate(SLOW).step_seconds for choice in choices)
    moments = sum(bucket.moment_bytes for bucket in under(None, fxshard.AdamW()).buckets)
    assert host - device == pytest.approx(moments / 1e7, rel=0.01)
    assert 0.24 < (bits - device) / (host - device) < 0.35


# -- what a run does ---------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What one rank saw."""

    schedule: Schedule
    losses: list[float]
    params: dict[str, torch.Tensor]
    at_rest: dict[str, int]
    report: str


def trained(optimizer: Any, budget: int | None, steps: range = range(3), folder: str = "", **options: Any) -> Trained:
    """``folder``: where to load from, before anything is captured, and to save to."""
    settings = {"hardware": "h200", "lowering": "eager", **options}
    model = fxshard.compile(Deep(), optimizer=optimizer, memory_budget=budget, **settings)
    if steps.start:  # a run that is resumed
        fxshard.load(model, folder)
    losses = []
    for step in steps:
        losses.append(float(train_step(model, *batch(step, dist.get_rank()))))
        if folder and step == 2:
            fxshard.save(model, folder)
    return Trained(model.schedule, losses, model.full_state_dict(), model.bytes_at_rest(), str(model.report))


def plain_losses(steps: int, ranks: int) -> list[float]:
    """Those of this rank, by torch alone: one process that has the batches of all ranks."""
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found = []
    for step in range(steps):
        each = [model(*batch(step, rank)) for rank in range(ranks)]
        found.append(float(each[dist.get_rank()].detach()))
        (sum(each) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def runs(budgets: dict[str, int], folder: str) -> dict[str, Any]:
    eight = fxshard.AdamW(lr=1e-2, state="8bit")
    return {
        "plain": plain_losses(5, dist.get_world_size()),
        "fixed": trained(fxshard.AdamW(lr=1e-2), None, range(5), folder=folder),
        "host": trained(HOST, budgets["host"], range(5)),
        "resumed": trained(HOST, budgets["host"], range(3, 5), folder=folder),
        "bits": trained(fxshard.AdamW(lr=1e-2, state="auto"), budgets["8bit"]),
        "8bit": trained(eight, None),
    }


def muons(budget: int) -> tuple[Trained, Trained]:
    return trained(fxshard.Muon(offload="auto"), budget), trained(fxshard.Muon(), None)


def planned(optimizer: Any, budget: int | None) -> Schedule:
    options: dict[str, Any] = {"world_size": 2, "hardware": "h200", "lowering": "eager"}
    return fxshard.plan(Deep(), batch(0, 0), optimizer=optimizer, memory_budget=budget, **options)


def between(optimizer: Any, below: Any, share: float) -> int:
    """A budget from the smallest of one to the smallest of the other."""
    return smallest(optimizer) + int((smallest(below) - smallest(optimizer)) * share)


@pytest.fixture(scope="module")
def ran(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    budgets = {
        "host": between(HOST, fxshard.AdamW(), 0.3),
        "8bit": smallest(fxshard.AdamW(state="8bit")),
    }
    return list(ranks(2, runs, budgets, str(tmp_path_factory.mktemp("state") / "saved"), timeout=240))


@pytest.mark.shows("M1", "M5")
def test_a_budget_puts_moments_on_the_host_and_no_bit_changes(ran: list[dict[str, Any]]) -> None:
    for found in ran:
        run: Trained = found["host"]
        state = kept(run.schedule)
        assert 0 < state.on_host < len(state.trained) and run.schedule.peak_bytes <= (run.schedule.budget or 0)
        assert run.losses == found["fixed"].losses == pytest.approx(found["plain"], rel=1e-5)
        assert all(torch.equal(run.params[name], found["fixed"].params[name]) for name in run.params)
        assert f"optimizer state: fp32 on the host for {state.on_host} of {LAYERS + 1} buckets" in run.report
        assert "of the device, for updates that take" in run.report
    most = max(found["host"].at_rest["host"] for found in ran)
    assert most == kept(ran[0]["host"].schedule).host_bytes


def test_the_plan_without_processes_chooses_the_same(ran: list[dict[str, Any]]) -> None:
    cases = {"host": HOST, "bits": fxshard.AdamW(lr=1e-2, state="auto")}
    for case, optimizer in cases.items():
        schedules = [found[case].schedule for found in ran]
        alone = planned(optimizer, schedules[0].budget)
        for schedule in schedules:
            assert kept(schedule).key == kept(alone).key, case
            assert schedule.peak_bytes == alone.peak_bytes


@pytest.mark.shows("M5")
def test_a_run_that_chose_8_bits_is_the_run_that_was_told_to(ran: list[dict[str, Any]]) -> None:
    for found in ran:
        assert kept(found["bits"].schedule).format == "8bit" and "host" not in found["bits"].at_rest
        assert found["bits"].losses == found["8bit"].losses != found["fixed"].losses[:3]
        assert found["bits"].at_rest["state"] == found["8bit"].at_rest["state"]
        assert "optimizer state: 8bit on the device" in found["bits"].report
        assert "optimizer state" not in found["fixed"].report.replace("masters and optimizer state", "")


@pytest.mark.thorough
def test_muons_momentum_may_be_on_both(ranks: Pool) -> None:
    for muon, fixed in ranks(2, muons, between(fxshard.Muon(offload="auto"), fxshard.Muon(), 0.8), timeout=240):
        state = kept(muon.schedule)
        assert 0 < state.on_host < len(state.trained)
        assert muon.losses == fixed.losses


@pytest.mark.shows("M5")
def test_a_checkpoint_is_loaded_before_anything_is_decided(ran: list[dict[str, Any]]) -> None:
    """State waits on the host until the first step is planned, and is moved to where that wants it."""
    for found in ran:
        assert kept(found["resumed"].schedule).on_host
        assert found["resumed"].losses == found["fixed"].losses[3:]
        for name, value in found["fixed"].params.items():
            assert torch.equal(found["resumed"].params[name], value), name


def test_a_larger_batch_sends_more_to_the_host() -> None:
    """And an evaluation sends nothing there that it need not, before training and after."""
    options: dict[str, Any] = {"hardware": FAST, "lowering": "eager"}
    on_host = fxshard.plan(Deep(), batch(0, 0, 192), world_size=1, optimizer=fxshard.AdamW(offload="host"), **options)
    model = fxshard.compile(Deep(), optimizer=HOST, memory_budget=on_host.peak_bytes, dynamic=False, **options)
    plain = Deep()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    found = []
    with torch.no_grad():
        model(*batch(0, 0))
    assert "optimizer state: " not in str(model.report)
    for step, size in enumerate((64, 64, 192, 64)):
        for each, own in ((model, model.optimizer), (plain, optimizer)):
            train_step(each, *batch(step, 0, size), optimizer=own)
        found.append(model.bytes_at_rest().get("host", 0))
        with torch.no_grad():
            model(*batch(0, 0))
    assert found[0] == found[1] < found[2] == found[3]
    for name, value in plain.state_dict().items():
        assert torch.equal(model.full_state_dict()[name], value), name


def test_state_that_waits_takes_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before, size = resident(), 2**28
    memory = untouched_memory(size)
    assert memory.numel() == size and resident() - before < size // 4
    memory[-3:] = 7
    assert memory[[0, size // 2, -1]].tolist() == [0, 0, 7]
    assert untouched_memory(0).numel() == 0


def test_without_a_graph_a_step_is_made_on_the_host() -> None:
    model = fxshard.shard(Deep(), optimizer=HOST, memory_budget=10**9)
    plain = Deep()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for (_, ours), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        other.grad = torch.ones_like(other)
        ours.grad = torch.ones_like(ours)
    model.optimizer.step()
    theirs.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.full_state_dict()[name], value)
