"""HSDP in which replicas share optimizer state: the same bits, and a fraction of the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.planner.layout import TensorSpec, shares, within
from fxshard.planner.rows import row_layout
from fxshard.schedule.events import Kind, Phase
from tests.pool import Pool
from tests.stack import Stack, wide, wide_batch
from tests.stack import batch as stack_batch
from tests.thorough import thorough
from tests.training import EPS, deliver, llama, random_gradients


class Rows(Stack):
    """Uneven numbers of rows that fill vectors of the CPU: AdamW rounds what does not otherwise, by where it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.head = nn.Linear(16, 5, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (0, 9)), y)


ONE, EACH = fxshard.AdamW(lr=1e-2, eps=EPS, over_replicas=True), fxshard.AdamW(lr=1e-2, eps=EPS)


Choice = fxshard.AdamW | fxshard.Muon


def trained(choice: Choice, **options: Any) -> tuple[dict[str, torch.Tensor], fxshard.ShardedModule]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fxshard.compile(Rows(), mesh=mesh, lowering="eager", optimizer=choice, **options)
    for step in range(3):
        model(*stack_batch(step, dist.get_rank())).backward()
        model.clip_grad_norm_(1.0)
        model.optimizer.step()
        model.optimizer.zero_grad()
    return model.full_state_dict(), model


BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)


def equal(settings: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    wrong, found = [], {}
    for zero, options in settings:
        mine, model = trained(ONE, zero=zero, **options)
        theirs, _ = trained(EACH, zero=zero, **options)
        wrong += [f"ZeRO-{zero} {name}" for name in theirs if not torch.equal(mine[name], theirs[name])]
    found["events"] = [
        (event.group, event.stream)
        for event in model.schedule.events
        if event.phase is Phase.OPTIMIZER and event.kind is Kind.EXCHANGE
    ]
    found["buckets"] = len(model.schedule.buckets)
    return {"wrong": wrong, "parameters": mine, **found}


@pytest.mark.shows("X5")
@pytest.mark.parametrize(
    "settings",
    [
        [(3, {"precision": BF16})],
        thorough([(3, {"fullgraph": False})]),
        thorough([(1, {"layout": "whole"}), (2, {"layout": "whole"}), (3, {})]),
    ],
)
def test_equals_hsdp_bitwise(ranks: Pool, settings: list[tuple[int, dict[str, Any]]]) -> None:
    found = ranks(4, equal, settings)
    for rank in found:
        assert rank["wrong"] == []
        assert all(torch.equal(value, found[0]["parameters"][name]) for name, value in rank["parameters"].items())
        assert rank["events"] == [("cpu×2 replicas", "replicas")] * rank["buckets"]


def muon_in_several_graphs(zero: int) -> list[str]:
    made = [
        trained(fxshard.Muon(lr=1e-2, over_replicas=over), zero=zero, layout="whole", fullgraph=False)[0]
        for over in (True, False)
    ]
    return [name for name in made[0] if not torch.equal(made[0][name], made[1][name])]


@pytest.mark.parametrize("zero", [2, thorough(3)])
def test_muon_shares_state_of_a_model_that_may_have_several_graphs(ranks: Pool, zero: int) -> None:
    assert ranks(4, muon_in_several_graphs, zero) == [[]] * 4


def memory(path: Path) -> tuple[list[int], list[int], list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    models = [fxshard.shard(wide(), mesh=mesh, optimizer=choice) for choice in (ONE, EACH)]
    for model in models:
        deliver(model, random_gradients(wide(), 0))
        model.optimizer.step()
    held = [model.bytes_at_rest()["state"] for model in models]
    planned = [sum(plan.at_rest().state for plan in model._sharding.plans) for model in models]
    # A checkpoint of shared state goes on where all keep it, and the other way round.
    wrong = []
    for one, (model, choice) in enumerate(zip(models, (EACH, ONE), strict=True)):
        fxshard.save(model, path / str(one))
        other = fxshard.shard(wide(), mesh=mesh, zero=2, optimizer=choice)
        fxshard.load(other, path / str(one))
        for each in (model, other):
            each.optimizer.zero_grad()
            deliver(each, random_gradients(wide(), 1))
            each.optimizer.step()
        before, after = model.full_state_dict(), other.full_state_dict()
        wrong += [name for name in before if not torch.equal(before[name], after[name])]
    return held, planned, wrong


@pytest.mark.shows("X5")
def test_state_takes_half_and_moves_between_both(ranks: Pool, tmp_path: Path) -> None:
    found = ranks(4, memory, tmp_path)
    for (shared, kept), _, wrong in found:
        assert shared < 0.55 * kept
        assert wrong == []
    most, planned = max(held[0] for held, _, _ in found), found[0][1][0]
    assert most <= planned <= 1.03 * most, "what a rank holds is what was planned"


def test_where_there_is_nothing_to_share_it_is_refused() -> None:
    with pytest.raises(fxshard.ConfigError, match=r"over_replicas=True is for HSDP"):
        fxshard.shard(Stack(), optimizer=ONE)
    with pytest.raises(fxshard.ConfigError, match="say it to Muon alone"):
        fxshard.Muon(adamw=ONE)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([1, 3, 64, 100])), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(2, 4),
)
def test_every_row_of_a_shard_is_updated_by_one_replica(
    matrices: list[tuple[int, int]], ranks: int, replicas: int
) -> None:
    layout = row_layout([TensorSpec(f"w{i}", shape) for i, shape in enumerate(matrices)], ranks)
    for shard in range(ranks):
        parts = shares(layout, shard, replicas)
        assert parts[0][0] == 0 and parts[-1][1] == layout.shard_numel
        for fragment in layout.fragments(shard):
            mine = [within(layout, fragment, *part) for part in parts]
            rows = [row for part in mine for row in range(part.row_start, part.row_stop)]
            assert rows == list(range(fragment.row_start, fragment.row_stop))
            assert sum(part.numel for part in mine) == fragment.numel
            width = layout.spec(fragment.name).row_numel
            assert all(part.numel == part.rows * width for part in mine if fragment.numel)


def test_a_plan_has_it_too() -> None:
    """Planned without ranks, simulated on the stream of replicas, verified, and the same after a trip through JSON."""
    x, y = wide_batch(0, 0)
    options: dict[str, Any] = {"world_size": 8, "shard_size": 2, "lowering": "eager"}
    plans = [fxshard.plan(wide(), (x, y), optimizer=choice, **options) for choice in (ONE, EACH)]
    shared, kept = plans
    assert shared.resident_bytes < kept.resident_bytes and shared.comm_bytes > kept.comm_bytes
    shared.verify()
    for schedule in plans:
        first = schedule.buckets[0]
        turned = replace(first, shares_state=not first.shares_state)
        with pytest.raises(fxshard.ScheduleError, match="other replicas updated"):
            replace(schedule, buckets=(turned, *schedule.buckets[1:])).verify()
    again = fxshard.Schedule.from_json(shared.to_json())
    assert again == shared and all(bucket.shares_state for bucket in again.buckets)
    assert shared.simulate("h200").step_seconds > kept.simulate("h200").step_seconds


def muons(path: Path) -> tuple[list[str], list[tuple[int, int]], list[str]]:
    """Muon and NorMuon, each with state in all replicas and shared by them: bits, bytes, and how buckets lie."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    wrong, held, kinds = [], [], []
    for zero, layout, kind in ((1, "auto", fxshard.Muon), (3, "whole", fxshard.NorMuon), (3, "rows", fxshard.Muon)):
        options: dict[str, Any] = {"mesh": mesh, "zero": zero, "layout": layout}
        choices = [kind(lr=1e-2, adamw=EACH, over_replicas=shared) for shared in (True, False)]
        models = [fxshard.shard(llama(layers=2), optimizer=choice, **options) for choice in choices]
        for model in models:
            for seed in range(2):
                deliver(model, random_gradients(llama(layers=2), seed))
                model.optimizer.step()
                model.optimizer.zero_grad()
        mine, theirs = (model.full_state_dict() for model in models)
        wrong += [f"ZeRO-{zero} {layout} {name}" for name in theirs if not torch.equal(mine[name], theirs[name])]
        held.append(tuple(sum(model.optimizer.state_bytes().values()) for model in models))
        plans = [bucket.plan for bucket in models[0]._sharding.buckets]
        kinds.append(",".join(sorted({f"{'whole' if p.layout.whole else 'rows'} {p.shares_state}" for p in plans})))
        planned = sum(plan.moment_bytes for plan in plans)
        if held[-1][0] > planned:
            wrong.append(f"{held[-1][0]} bytes held, {planned} planned")
        if layout != "rows":
            fxshard.save(models[0], path / layout)
            other = fxshard.shard(llama(layers=2), optimizer=kind(lr=1e-2, adamw=EACH), zero=2)
            fxshard.load(other, path / layout)
            for model in (models[0], other):
                deliver(model, random_gradients(llama(layers=2), 5))
                model.optimizer.step()
            mine, theirs = models[0].full_state_dict(), other.full_state_dict()
            wrong += [f"loaded {layout} {n}" for n in theirs if not torch.allclose(mine[n], theirs[n], atol=1e-5)]
    return wrong, held, kinds


@pytest.mark.thorough
@pytest.mark.shows("X5")
def test_muon_shares_state_and_work_of_whole_matrices(ranks: Pool, tmp_path: Path) -> None:
    found = ranks(4, muons, tmp_path)
    assert [wrong for wrong, _, _ in found] == [[], [], [], []]
    for i, most in enumerate((0.6, 0.6)):  # of what two replicas keep together, each has a half
        shared, kept = (sum(held[i][which] for _, held, _ in found) for which in (0, 1))
        assert shared < most * kept
    assert {kinds[1] for _, _, kinds in found} == {"whole True"}
    assert all("rows False" in kinds[2] for _, _, kinds in found)  # matrices travel there: every replica keeps them
