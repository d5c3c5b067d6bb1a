"""Plans for Muon: who owns which matrix, which layout a bucket gets, what travels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxshard
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.buckets import plan_buckets
from fxshard.planner.choice import crosses
from fxshard.planner.domain import Domain, data_parallel
from fxshard.planner.exchange import plan_exchange
from fxshard.planner.layout import TensorSpec
from fxshard.planner.optimizer_step import Done, Exchange, Land, Local, Orthogonalize, plan_step
from fxshard.planner.units import find_units
from fxshard.schedule.events import Kind, Phase
from fxshard.schedule.updates import updates
from tests.thorough import thorough
from tests.toy import Llama


def llama(layers: int = 32, dim: int = 256, hidden: int = 896) -> nn.Module:
    with torch.device("meta"):
        return Llama(vocab=1000, dim=dim, layers=layers, heads=4, hidden=hidden)


def planned(model: nn.Module, zero: int, ranks: int, **options: object) -> tuple[BucketPlan, ...]:
    hidden = {name for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers")}
    return plan_buckets(model, find_units(model), zero=zero, ranks=ranks, matrices=hidden, **options)  # type: ignore[arg-type]


def cost(shape: tuple[int, ...]) -> int:
    return min(shape) ** 2 * max(shape)


def owners_work(plans: tuple[BucketPlan, ...], ranks: int, cost: Callable[[tuple[int, ...]], int] = cost) -> list[int]:
    """What each rank orthogonalizes, from layouts and exchanges."""
    work = [0] * ranks
    travelling = {travel.name: travel.owner for batch in plan_exchange(plans) for travel in batch.travels}
    for plan in plans:
        for slot in plan.layout.slots:
            if slot.spec.name in plan.matrices:
                owner = travelling.get(slot.spec.name, plan.layout.owner(slot.spec.name))
                work[owner] += cost(slot.spec.shape)
    return work


@pytest.mark.shows("L12")
@pytest.mark.parametrize(("zero", "layout"), [(1, "auto"), (2, "auto"), (3, "auto"), (3, "whole"), (3, "rows")])
def test_owners_are_balanced_by_newton_schulz_cost(zero: int, layout: str) -> None:
    plans = planned(llama(), zero, 8, layout=layout)
    work = owners_work(plans, 8)
    assert max(work) <= 1.1 * sum(work) / 8
    if all(plan.layout.whole for plan in plans if plan.matrices):
        held = [sum(math.prod(f.shape) for p in plans for f in _owned(p, rank)) for rank in range(8)]
        assert max(held) <= 1.3 * sum(held) / 8


def _owned(plan: BucketPlan, rank: int) -> list[TensorSpec]:
    names = {f.name for f in plan.layout.fragments(rank) if f.numel}
    return [slot.spec for slot in plan.layout.slots if slot.spec.name in names and slot.spec.name in plan.matrices]


@pytest.mark.shows("O8")
def test_buckets_without_matrices_keep_rows_and_others_say_why() -> None:
    for plan in planned(llama(layers=4), 1, 2):
        assert plan.layout.whole == bool(plan.matrices)
        assert plan.why


def test_zero_1_joins_units_until_padding_vanishes() -> None:
    plans = planned(llama(), 1, 8)
    with_matrices = [plan for plan in plans if plan.matrices]
    assert 1 < len(with_matrices) < 32
    assert all(plan.layout.whole and plan.layout.padding < 0.1 * plan.layout.numel for plan in with_matrices)
    assert len([plan for plan in planned(llama(), 3, 8) if plan.matrices]) == 32  # gathered just in time: one each


def test_too_few_matrices_for_the_ranks_become_rows() -> None:
    plans = planned(llama(layers=2), 3, 64)
    assert all(not plan.layout.whole for plan in plans)
    assert any("exchange" in plan.why for plan in plans)


@pytest.mark.shows("O4")
@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(1, 4), st.sampled_from([16, 40, 64]), st.integers(1, 200))
def test_exchanges_carry_each_crossing_matrix_once(ranks: int, layers: int, dim: int, limit_kib: int) -> None:
    plans = planned(llama(layers, dim, 3 * dim + 8), 3, ranks, layout="rows")
    batches = plan_exchange(plans, limit_kib * 1024)
    names = [travel.name for batch in batches for travel in batch.travels]
    crossing = {
        s.spec.name for p in plans for s in p.layout.slots if s.spec.name in p.matrices and crosses(p.layout, s.spec)
    }
    assert sorted(names) == sorted(crossing)
    for batch in batches:
        for a in range(ranks):
            assert batch.to_owners(a) == [batch.from_holders(b)[a] for b in range(ranks)]  # what is sent is expected
        received = [sum(batch.from_holders(rank)) * 4 for rank in range(ranks)]
        assert sum(received) == batch.numel * 4
        alone = max(math.prod(travel.shape) * 4 for travel in batch.travels)
        assert max(received) <= max(limit_kib * 1024, alone)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.sampled_from([1, 3]), st.sampled_from(["rows", "auto"]))
def test_a_step_updates_every_bucket_once_and_lands_what_it_sends(ranks: int, zero: int, layout: str) -> None:
    plans = planned(llama(3, 40, 120), zero, ranks, layout=layout)
    program = plan_step(plans)
    done = [index for op in program if isinstance(op, Done) for index in op.buckets]
    local = [index for op in program if isinstance(op, Local) for index in op.buckets]
    assert sorted(done) == sorted(local) == [plan.index for plan in plans]
    at = {
        (type(op), id(op.batch)): i for i, op in enumerate(program) if isinstance(op, Exchange | Orthogonalize | Land)
    }
    ready = {index: i for i, op in enumerate(program) if isinstance(op, Done) for index in op.buckets}
    for (kind, batch), i in at.items():
        if kind is Land:
            assert at[Exchange, batch] < at[Orthogonalize, batch] < i
    for i, op in enumerate(program):
        if isinstance(op, Land):
            assert all(ready[index] > i for index in op.batch.buckets)


@pytest.mark.parametrize("zero", [thorough(1), thorough(3)])
def test_the_schedule_counts_the_work_of_the_busiest_rank_once(zero: int) -> None:
    """Who holds matrices alone is dealt fewer that travel: the two are not added up for different ranks."""
    model = llama(layers=4)
    tokens = torch.zeros(1, 16, dtype=torch.long, device="meta")
    schedule = fxshard.plan(
        model, (tokens, tokens), world_size=8, zero=zero, optimizer=fxshard.Muon(), lowering="eager"
    )
    flops = sum(event.flops for event in schedule.events if event.phase is Phase.OPTIMIZER)
    work = owners_work(planned(model, zero, 8), 8, lambda shape: 15 * cost(shape) + 5 * min(shape) ** 3)
    assert max(work) <= flops <= 1.05 * max(work)


def test_an_exchange_runs_in_the_group_of_its_buckets() -> None:
    """Of a model whose second layer belongs to other ranks, wherever the first gather runs."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    own, others = data_parallel(8, 1, "mean", "cuda"), Domain(4, device="cuda", name="1.*")
    names = [name for name, _ in model.named_parameters()]
    plans = plan_buckets(
        model,
        find_units(model, ["0", "1"]),
        zero=3,
        ranks=8,
        layout="rows",
        matrices=names,
        domain_of=lambda name: others if name.startswith("1") else own,
    )
    exchanges = [event for event in updates({}, plans, {}, "cuda×8") if event.kind is Kind.EXCHANGE]
    groups = {(plans[event.reads[0]].unit, event.group) for event in exchanges}
    assert groups == {("0", "cuda×8"), ("1", "1.* cuda×4")}
