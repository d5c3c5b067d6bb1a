"""Plans for a mesh of several dimensions, without processes. ``test_tensor_parallel`` has the run that equals one."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.schedule.events import Kind
from tests.parallel import batch, cut, on_meta
from tests.pool import Pool

OPTIONS: dict[str, Any] = {"lowering": "eager", "optimizer": fxshard.AdamW(lr=1e-2)}
INPUTS = tuple(value.repeat(16, 1) for value in batch(0, 0))
"""So many that activations count beside parameters."""
ON_CPU: dict[str, Any] = {"mesh": {"dp": 2, "tp": 2}, "parallelize": cut, "hardware": "cpu", **OPTIONS}


def plans() -> dict[str, Any]:
    """On a rank that leaves its group, because this makes torch's fake one."""
    dist.destroy_process_group()
    model = on_meta()
    free = fxshard.plan(model, INPUTS, **ON_CPU)
    assert not dist.is_initialized() and all(parameter.is_meta for parameter in model.parameters())
    h200 = fxshard.plan(model, INPUTS, mesh={"dp_replicate": 4, "dp_shard": 8, "tp": 8}, parallelize=cut, **OPTIONS)
    tight = within_budget(model)
    return {"free": free.to_json(), "h200": h200.to_json(), "tight": tight, "errors": refused(model)}


def within_budget(model: nn.Module) -> tuple[int, str]:
    """The smallest memory budget, and the plan for it."""
    try:
        fxshard.plan(model, INPUTS, memory_budget=1, **ON_CPU)
    except fxshard.BudgetError as error:
        return error.smallest, fxshard.plan(model, INPUTS, memory_budget=error.smallest, **ON_CPU).to_json()
    raise AssertionError("nothing fits one byte")


def refused(model: nn.Module) -> list[str]:
    said = []
    wrong: list[dict[str, Any]] = [
        {"mesh": {}},
        {"mesh": {"dp": 0}},
        {"mesh": {"dp": 2}, "world_size": 2},
        {"world_size": 2, "parallelize": cut},
        {"mesh": {"dp": 2}, "groups": {"*": "ep"}},
    ]
    for given in wrong:
        try:
            fxshard.plan(model, batch(0, 0), **given)
        except fxshard.ConfigError as error:
            said.append(str(error))
        assert not dist.is_initialized()
    return said


@pytest.fixture(scope="module")
def planned(ranks: Pool) -> dict[str, Any]:
    return ranks(1, plans, timeout=300)[0]


@pytest.mark.shows("T7")
def test_a_mesh_of_three_dimensions(planned: dict[str, Any]) -> None:
    """256 ranks: tensor-parallel ones share a node, shards are eight ranks apart, replicas 64."""
    schedule = fxshard.Schedule.from_json(planned["h200"])
    schedule.verify()
    assert [(group.name, group.stride) for group in schedule.model_groups] == [("tp×8", 1)]
    domain = schedule.buckets[0].domain
    assert (domain.shards, domain.replicas, domain.stride, schedule.ranks) == (8, 4, 8, 32)
    assert any(True for _ in schedule.of(Kind.ALL_REDUCE)) and schedule.simulate("h200").step_seconds > 0


@pytest.mark.shows("M1", "T7")
def test_a_budget_counts_what_the_models_own_collectives_make(planned: dict[str, Any]) -> None:
    smallest, found = planned["tight"]
    schedule = fxshard.Schedule.from_json(found)
    schedule.verify()
    assert schedule.peak_bytes == smallest and schedule.recomputed
    collectives = [event for _, event in schedule.of(Kind.COLLECTIVE)]
    assert all(event.peak >= event.bytes for event in collectives) and schedule.model_groups
    free = fxshard.Schedule.from_json(planned["free"])
    assert smallest < free.peak_bytes and len(collectives) == len(list(free.of(Kind.COLLECTIVE)))


def test_what_is_refused_leaves_no_process_group(planned: dict[str, Any]) -> None:
    empty, zero, both, without, unknown = planned["errors"]
    assert "expected the ranks along each dimension" in empty and "expected the ranks along each dimension" in zero
    assert "leave out world_size=" in both
    assert "mesh=, which is not given" in without
    assert "expected one of its dimensions, 'dp'" in unknown
