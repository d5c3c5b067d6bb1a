"""Experts on their own ranks, tokens sent to them and back: four ranks as 2 × 2, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.schedule.events import Kind, Phase
from tests.expert_parallel import LAYERS, MESH, Model, batch, counts_in_the_graph, cut, options, part, plan_of
from tests.pool import Pool
from tests.thorough import thorough
from tests.training import EPS, full_gradients

STEPS = 3


def trained(stages: list[int], lowering: str) -> dict[int, dict[str, Any]]:
    """Losses, and gradients and parameters after the last step, of this rank."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    found: dict[int, dict[str, Any]] = {}
    for zero in stages:
        given = options(zero, lowering)
        model = fxshard.compile(cut(Model(), mesh), groups={"*.experts.*": mesh["ep_dp"]}, **given)
        losses = []
        with counts_in_the_graph():
            for step in range(STEPS):
                loss = model(*batch(step, 4, rank))
                loss.backward()
                losses.append(loss.item())
                if step < STEPS - 1:
                    model.optimizer.step()
                    model.optimizer.zero_grad()
        found[zero] = {
            "losses": losses,
            "gradients": full_gradients(model),
            "parameters": model.full_state_dict(),
            "schedule": model.schedule.to_json(),
        }
    return found


def reference() -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One process with all experts, on the whole batch."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, fused=True)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.item())
        if step < STEPS - 1:
            optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, model.state_dict()


@pytest.fixture(scope="module", params=[3, thorough(1)], ids=["ZeRO-3", "ZeRO-1"])
def found(ranks: Pool, request: pytest.FixtureRequest) -> list[dict[int, dict[str, Any]]]:
    return ranks(4, trained, [request.param], "eager", timeout=300)


def check(found: list[dict[int, dict[str, Any]]]) -> None:
    losses, gradients, parameters = reference()
    for zero in found[0]:
        for step, loss in enumerate(losses):
            mean = sum(by_stage[zero]["losses"][step] for by_stage in found) / len(found)
            assert mean == pytest.approx(loss, rel=1e-6), (zero, step)
        for rank, by_stage in enumerate(found):
            mine = by_stage[zero]
            for name, value in gradients.items():
                torch.testing.assert_close(
                    mine["gradients"][name], part(name, value, rank), rtol=1e-4, atol=1e-7, msg=f"{zero} {name}"
                )
            for name, value in parameters.items():
                torch.testing.assert_close(
                    mine["parameters"][name], part(name, value, rank), rtol=1e-5, atol=1e-6, msg=f"{zero} {name}"
                )


@pytest.mark.shows("T6")
def test_dispatch_and_combine_train_as_in_one_process(found: list[dict[int, dict[str, Any]]]) -> None:
    check(found)


@pytest.mark.shows("T6")
@pytest.mark.parametrize("lowering", [thorough("inductor")])
def test_compiled_segments_do_too(ranks: Pool, lowering: str) -> None:
    check(ranks(4, trained, [3], lowering, timeout=600))


@pytest.mark.shows("T7", "P2")
def test_the_plan_of_the_mesh_is_the_run(found: list[dict[int, dict[str, Any]]]) -> None:
    """Event by event. How many tokens go to whom is data, which neither knows."""
    for by_stage in found:
        for zero in by_stage:
            plan = plan_of(zero)
            run = fxshard.Schedule.from_json(by_stage[zero]["schedule"])
            assert run.events == plan.events, run.diff(plan)
            assert run.buckets == plan.buckets and run.model_groups == plan.model_groups
            assert run == plan


@pytest.mark.shows("T5", "T6")
def test_dense_and_expert_buckets_and_the_models_collectives_are_in_one_schedule(
    found: list[dict[int, dict[str, Any]]],
) -> None:
    for by_stage in found:
        (run,) = by_stage.values()
        schedule = fxshard.Schedule.from_json(run["schedule"])
        schedule.verify()
        assert {event.group for _, event in schedule.of(Kind.REDUCE)} == {"cpu×4", "*.experts.* cpu×2"}
        starts = [event for _, event in schedule.of(Kind.COLLECTIVE)]
        # Counts, tokens there and back for each layer; backward sends tokens both ways.
        assert len(starts) == LAYERS * (3 + 2)
        assert {(event.op, event.group) for event in starts} == {("all_to_all_single", "ep×2")}
        for start, _ in schedule.of(Kind.COLLECTIVE, phase=Phase.BACKWARD):
            hidden = schedule.events[start + 1 : _await(schedule, start)]
            assert sum(event.flops for event in hidden) > 0, "weight gradients run while tokens travel"


def _await(schedule: fxshard.Schedule, start: int) -> int:
    event = schedule.events[start]
    return next(i for i, e in schedule.of(Kind.AWAIT, phase=event.phase) if e.number == event.number)
