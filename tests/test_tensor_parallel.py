"""ZeRO over the data-parallel dimension of tensor-parallel models: what FSDP2 computes and shows for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxshard
from tests.parallel import batch, cut, fsdp2, on_meta, parallel, two_by_two, whole
from tests.pool import Pool
from tests.thorough import thorough
from tests.training import EPS

STEPS = 2


def trained(model: Any, step: Callable[[], None], rank: int) -> dict[str, Any]:
    """Losses and placements of a run that ends with gradients in place."""
    losses: list[float] = []
    for number in range(STEPS):
        if losses:
            step()
            model.zero_grad()
        loss = model(*batch(number, rank))
        loss.backward()
        losses.append(float(loss.detach()))
    placed = {
        name: (p.placements, tuple(p.shape), p.device_mesh.mesh_dim_names) for name, p in model.named_parameters()
    }
    same = all(p.grad.placements == p.placements and p.grad.shape == p.shape for p in model.parameters())
    return {"losses": losses, "placed": placed, "gradients are placed alike": same}


def rows(model: fxshard.ShardedModule) -> dict[str, Any]:
    """This rank's part of every gradient, and where it lies."""
    return {
        name: (bucket.offsets(name), parameter.grad.to_local().clone())
        for bucket in model._sharding.buckets
        for name, parameter in bucket.named()
    }


def options(zero: int) -> dict[str, Any]:
    return {"zero": zero, "lowering": "eager", "optimizer": fxshard.AdamW(lr=1e-2, eps=EPS)}


def of_stages(stages: tuple[int, ...]) -> dict[str, Any]:
    mesh = two_by_two()
    rank = mesh["dp"].get_local_rank()
    reference = fsdp2(mesh)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=EPS, fused=True)
    theirs = trained(reference, optimizer.step, rank)
    theirs["grads"] = {name: whole(p.grad) for name, p in reference.named_parameters() if p.grad is not None}
    optimizer.step()
    theirs["params"] = {name: whole(p.detach()) for name, p in reference.named_parameters()}
    found = {"FSDP2": theirs}
    for zero in stages:
        model = fxshard.compile(parallel(mesh), mesh=mesh["dp"], **options(zero))
        run = found[f"ZeRO-{zero}"] = trained(model, model.optimizer.step, rank)
        run["schedule"] = model.schedules["train"].to_json()
        run["rows"] = rows(model)
        run["norms"] = {name: float(norm) for name, norm in model.norms().items()}
        run["clipped"] = [float(model.clip_grad_norm_(1e9, kind)) for kind in (2.0, 1.0, float("inf"))]
        placed = [p for p in model.parameters() if p.device_mesh.ndim == 2]  # torch takes one mesh at a time
        run["torch's norm"] = float(nn.utils.clip_grad_norm_(placed, 1e9).full_tensor())
        model.optimizer.step()
        run["params"] = model.full_state_dict()
        run["full_tensor"] = {name: p.full_tensor() for name, p in model.named_parameters()}
        run["parameter norms"] = {name: float(norm) for name, norm in model.norms("param").items()}
        model(*batch(0, rank)).backward()
        model.clip_grad_norm_(0.01)
        run["norm after clipping"] = float(model.norms()[""])
    return found


@pytest.fixture(scope="module", params=[(3,), thorough((0, 1, 2))], ids=["ZeRO-3", "ZeRO-0 to 2"])
def stages(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def found(ranks: Pool, stages: tuple[int, ...]) -> list[dict[str, Any]]:
    return ranks(4, of_stages, stages)


@pytest.mark.shows("T1")
def test_losses_gradients_and_parameters_are_those_of_fsdp2_bitwise(
    found: list[dict[str, Any]], stages: tuple[int, ...]
) -> None:
    for zero in stages:
        same_as_fsdp2(found, f"ZeRO-{zero}")


def same_as_fsdp2(found: list[dict[str, Any]], stage: str) -> None:
    theirs = found[0]["FSDP2"]
    for name, gradient in theirs["grads"].items():
        mine = torch.full_like(gradient, torch.nan)
        for rank in found:
            at, part = rank[stage]["rows"][name]
            mine[tuple(slice(begin, begin + size) for begin, size in zip(at, part.shape, strict=True))] = part
        assert torch.equal(mine, gradient), name
    for rank in found:
        assert rank[stage]["losses"] == rank["FSDP2"]["losses"]
        for name, value in theirs["params"].items():
            assert torch.equal(rank[stage]["params"][name], value), name
            assert torch.equal(rank[stage]["full_tensor"][name], value), name
    assert len({tuple(rank[stage]["losses"]) for rank in found}) == 2  # two data-parallel ranks


@pytest.mark.shows("T2")
def test_placements_are_those_of_fsdp2(found: list[dict[str, Any]], stages: tuple[int, ...]) -> None:
    for rank in found:
        for zero in stages:
            run = rank[f"ZeRO-{zero}"]
            assert run["gradients are placed alike"]
            if zero == 0:
                assert [str(each) for each in run["placed"]["layers.0.up.weight"][0]] == ["R", "S(0)"]
                continue
            assert run["placed"] == rank["FSDP2"]["placed"]
        placed = {
            name: [str(each) for each in placements] for name, (placements, *_) in rank["FSDP2"]["placed"].items()
        }
        assert placed["layers.0.up.weight"] == ["_S(0, 2)", "S(0)"]
        assert placed["layers.0.down.weight"] == ["S(0)", "S(1)"]
        assert placed["layers.0.norm.weight"] == ["S(0)", "R"]
        assert placed["scale"] == ["S(0)"]


@pytest.mark.shows("T2", "O7")
def test_norms_count_every_element_once(found: list[dict[str, Any]], stages: tuple[int, ...]) -> None:
    theirs = found[0]["FSDP2"]
    flat = torch.cat([value.flatten() for value in theirs["grads"].values()])
    placed = torch.cat([value.flatten() for name, value in theirs["grads"].items() if name != "scale"])
    for run in (rank[f"ZeRO-{zero}"] for rank in found for zero in stages):
        assert run["clipped"] == pytest.approx([float(flat.norm(kind)) for kind in (2, 1, torch.inf)], rel=1e-5)
        assert run["torch's norm"] == pytest.approx(float(placed.norm()), rel=1e-5)
        assert run["norm after clipping"] == pytest.approx(0.01, rel=1e-3)
        assert run["norms"][""] == pytest.approx(float(flat.norm()), rel=1e-5)
        for name, value in theirs["grads"].items():
            assert run["norms"][name] == pytest.approx(float(value.norm()), rel=1e-5), name
            assert run["parameter norms"][name] == pytest.approx(float(theirs["params"][name].norm()), rel=1e-5)


def plans(stages: tuple[int, ...]) -> dict[int, str]:
    """On a rank that leaves its group, because this makes torch's fake one."""
    dist.destroy_process_group()
    about = {"mesh": {"dp": 2, "tp": 2}, "parallelize": cut, "hardware": "cpu"}
    return {zero: fxshard.plan(on_meta(), batch(0, 0), **about, **options(zero)).to_json() for zero in stages}


@pytest.mark.shows("T7", "P2")
def test_a_plan_for_data_and_tensor_parallel_is_the_run(
    ranks: Pool, found: list[dict[str, Any]], stages: tuple[int, ...]
) -> None:
    planned = ranks(1, plans, stages)[0]
    for rank in found:
        for zero in stages:
            run = fxshard.Schedule.from_json(rank[f"ZeRO-{zero}"]["schedule"])
            plan = fxshard.Schedule.from_json(planned[zero])
            for i, (mine, theirs) in enumerate(zip(run.events, plan.events, strict=True)):
                assert mine == theirs, f"ZeRO-{zero}, event {i}"
            assert run == plan


# -- with replicas -----------------------------------------------------------------------------------------------------


def with_replicas(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Gradients and placements of HSDP with tensor parallelism, FSDP2's and ours."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"]
    rank = mesh["replicate"].get_local_rank() * shape[1] + mesh["shard"].get_local_rank()
    reference = parallel(mesh)
    fully_shard(reference, mesh=data)
    model = fxshard.compile(parallel(mesh), mesh=data, lowering="eager")
    found: dict[str, Any] = {}
    for name, each in (("theirs", reference), ("ours", model)):
        each(*batch(0, rank)).backward()
        found[name] = {name: (p.placements, p.device_mesh.mesh_dim_names) for name, p in each.named_parameters()}
    found["rows"] = rows(model)
    found["grads"] = {name: whole(p.grad) for name, p in reference.named_parameters() if p.grad is not None}
    found["norm"] = float(model.clip_grad_norm_(1e9))
    return found


@pytest.mark.thorough
@pytest.mark.shows("T1", "T2", "S10")
@pytest.mark.parametrize("shape", [(2, 1, 2), thorough((1, 2, 2))], ids=["two replicas", "two shards"])
def test_hsdp(ranks: Pool, shape: tuple[int, int, int]) -> None:
    found = ranks(4, with_replicas, shape)
    grads = found[0]["grads"]
    flat = torch.cat([value.flatten() for value in grads.values()])
    for name, gradient in grads.items():
        mine = torch.full_like(gradient, torch.nan)
        for rank in found:
            at, part = rank["rows"][name]
            mine[tuple(slice(begin, begin + size) for begin, size in zip(at, part.shape, strict=True))] = part
        assert torch.equal(mine, gradient), name
    for rank in found:
        assert rank["norm"] == pytest.approx(float(flat.norm()), rel=1e-5)
        if shape[1] > 1:  # of one shard, FSDP2 says that it is sharded
            assert rank["ours"] == rank["theirs"]
