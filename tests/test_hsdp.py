"""HSDP: shards inside, replicas outside, on a mesh of two by two; the same numbers as plain data parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard.schedule.events import Kind
from fxshard.schedule.schedule import Schedule
from tests.pool import Pool
from tests.stack import Stack, wide, wide_batch
from tests.stack import batch as stack_batch
from tests.training import EPS, fsdp2_run, full_gradients, train_step, with_debug


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def seeded_by_rank() -> nn.Module:
    """Ranks start with different weights; rank 0's must win on all four."""
    model = Stack()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    return model


# -- scaling, norms, state, schedule, memory: one trip to the ranks ----------------------------------------------------

BF16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16 mean": {"precision": BF16},
    "bf16 sum, ZeRO-0": {"precision": BF16, "reduction": "sum", "zero": 0},
    "sum, no overlap, no arena": {"reduction": "sum", "overlap": False, "arena": False},
}


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return stack_batch(step, dist.get_rank())


def details() -> dict[str, Any]:
    mesh = two_by_two()
    found: dict[str, Any] = {"gradients": {}}
    for name, options in SETTINGS.items():
        model = fxshard.compile(Stack(), mesh=mesh, lowering="eager", **with_debug(options))
        model(*batch_of(0)).backward()
        found["gradients"][name] = full_gradients(model)

    for zero in range(4):
        optimizer = fxshard.AdamW(lr=1e-2, eps=EPS)
        model = fxshard.compile(seeded_by_rank(), mesh=mesh, zero=zero, lowering="eager", optimizer=optimizer)
        for step in range(5):
            model(*batch_of(step)).backward()
            if (zero, step) == (3, 0):
                found["gradients"]["mean"] = full_gradients(model)
            model.optimizer.step()
            model.optimizer.zero_grad()
        found[f"ZeRO-{zero}"] = model.full_state_dict()
    found["FSDP2"] = fsdp2_run(Stack, lr=1e-2, mesh=mesh).params

    with pytest.raises(fxshard.ConfigError, match=r"ranks \[\[0, 1\], \[3, 2\]\], which do not ascend"):
        fxshard.compile(Stack(), mesh=DeviceMesh("cpu", [[0, 1], [3, 2]]))  # 0 and 3 would hold different shards

    model.load_state_dict(Stack().state_dict())
    model(*batch_of(0)).backward()
    model(*batch_of(1)).backward()  # on top of gradients that are there
    found["accumulated"] = full_gradients(model)
    model.optimizer.zero_grad()
    with model.no_sync():
        model(*batch_of(0)).backward()
    model(*batch_of(1)).backward()
    found["reduced once"] = full_gradients(model)
    found["norms"] = [float(model.clip_grad_norm_(1e9, kind)) for kind in (2.0, float("inf"))]
    found["torch's norm"] = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor())
    weight = model.get_parameter("head.weight")
    found["placements"] = [str(placement) for placement in weight.placements]
    found["rows"] = weight.to_local().shape[0]
    found["schedule"] = model.schedule
    found["bytes"] = model.bytes_at_rest()
    model.optimizer.step()
    other = fxshard.shard(Stack(), mesh=mesh)
    other.load_state_dict(model.full_state_dict())
    full = model.full_state_dict()
    found["state"] = all(torch.equal(value, full[name]) for name, value in other.full_state_dict().items())
    return found


@pytest.fixture(scope="module")
def found(ranks: Pool) -> list[dict[str, Any]]:
    return ranks(4, details)


def plain_gradients(steps: int = 1) -> dict[str, torch.Tensor]:
    model = Stack()
    for step in range(steps):
        parts = [stack_batch(step, rank) for rank in range(4)]
        model(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.shows("S10")
def test_all_stages_train_as_one_process_and_fsdp2_do(found: list[dict[str, Any]]) -> None:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, fused=True)
    for step in range(5):
        parts = [stack_batch(step, rank) for rank in range(4)]
        train_step(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), optimizer=optimizer)
    for rank in found:
        for name, value in model.state_dict().items():
            for zero in range(4):
                mine = rank[f"ZeRO-{zero}"][name]
                assert (mine - value).norm() / value.norm() < 1e-6, f"ZeRO-{zero} {name}"
                assert (mine - rank["FSDP2"][name]).norm() / value.norm() < 1e-6, f"ZeRO-{zero} {name}"
                assert torch.equal(mine, found[0][f"ZeRO-{zero}"][name]), "replicas differ"
            # Reduce-scatter and all-reduce add in the same order: (0 + 1) + (2 + 3).
            assert torch.equal(rank["ZeRO-1"][name], rank["ZeRO-3"][name])
            assert torch.equal(rank["ZeRO-2"][name], rank["ZeRO-3"][name])


@pytest.mark.shows("S9")
def test_scaling(found: list[dict[str, Any]]) -> None:
    reference = plain_gradients()
    for rank in found:
        for name, gradients in rank["gradients"].items():
            factor, close = (4 if "sum" in name else 1), (5e-2 if "bf16" in name else 1e-5)
            for parameter, value in reference.items():
                off = (gradients[parameter] - factor * value).norm() / (factor * value).norm()
                assert off < close, f"{name}: {parameter}"
        assert all(  # four times a mean is exact
            torch.equal(4 * value, rank["gradients"]["sum, no overlap, no arena"][name])
            for name, value in rank["gradients"]["mean"].items()
        )


@pytest.mark.shows("S9", "S11", "O7")
def test_accumulation_norms_and_state(found: list[dict[str, Any]]) -> None:
    reference = plain_gradients(2)
    flat = torch.cat([value.flatten() for value in reference.values()])
    for rank in found:
        for name, value in reference.items():
            torch.testing.assert_close(rank["accumulated"][name], value, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(rank["reduced once"][name], value, rtol=1e-4, atol=1e-6)
        assert rank["norms"] == pytest.approx([float(flat.norm()), float(flat.abs().max())], rel=1e-5)
        assert rank["torch's norm"] == pytest.approx(float(flat.norm()), rel=1e-5)
        assert rank["placements"] == ["R", "S(0)"]
        assert rank["state"]
    assert sum(rank["rows"] for rank in found[:2]) == sum(rank["rows"] for rank in found[2:]) == 5


@pytest.mark.shows("S10", "P2", "P5")
def test_the_schedule_shows_both_and_plan_gives_it(found: list[dict[str, Any]]) -> None:
    with torch.device("meta"):
        model = Stack()
    settings: dict[str, Any] = {"hardware": "cpu", "lowering": "eager", "optimizer": fxshard.AdamW()}
    planned = fxshard.plan(model, stack_batch(0, 0), world_size=4, shard_size=2, **settings)
    for rank in found:
        assert rank["schedule"] == planned
    reduces, adds = (list(planned.of(kind)) for kind in (Kind.REDUCE, Kind.ALL_REDUCE))
    assert len(reduces) == len(adds) == len(planned.buckets)
    for (_, reduce), (i, add) in zip(reduces, adds, strict=True):
        assert (add.bucket, add.stream, add.group, add.bytes) == (
            reduce.bucket,
            "replicas",
            "cpu×2 replicas",
            reduce.bytes // 2,
        )
        assert [planned.events[need].kind for need in planned.events[i].waits_for] == [Kind.REDUCE]
        assert (reduce.stream, reduce.group) == ("reduce", "cpu×2")
    assert fxshard.Schedule.from_json(planned.to_json()) == planned
    assert "4 ranks (2 replicas of 2 shards)" in str(planned) and "all_reduce" in str(planned)


# -- planning ----------------------------------------------------------------------------------------------------------


def planned(zero: int = 3, shard_size: int | None = 8) -> Schedule:
    with torch.device("meta"):
        model = wide()
    return fxshard.plan(
        model, wide_batch(0, 0), world_size=64, shard_size=shard_size, zero=zero, lowering="eager", hardware="h200"
    )


@pytest.mark.shows("S10")
def test_replicas_cost_memory_and_save_traffic_between_nodes() -> None:
    hybrid, full = planned(), planned(shard_size=None)
    assert hybrid.ranks == full.ranks == 64 and hybrid.resident_bytes > full.resident_bytes
    assert not list(full.of(Kind.ALL_REDUCE)) and list(hybrid.of(Kind.ALL_REDUCE))
    assert hybrid.simulate("h200").step_seconds < full.simulate("h200").step_seconds  # all latency at this size
    assert planned(shard_size=64) == full


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_other_stages_plan_too(zero: int) -> None:
    schedule = planned(zero)
    assert bool(list(schedule.of(Kind.ALL_REDUCE))) is (zero > 0)  # ZeRO-0 reduces once, over everyone
    assert {event.group for _, event in schedule.of(Kind.REDUCE)} == {"cuda×64" if zero == 0 else "cuda×8"}
    schedule.simulate("h200")


@pytest.mark.parametrize("shard_size", [0, 7, 128, -8, 8.0, True])
def test_wrong_shard_size(shard_size: Any) -> None:
    with pytest.raises(fxshard.ConfigError, match="shard_size"):
        planned(shard_size=shard_size)


def test_wrong_reduction() -> None:
    with pytest.raises(fxshard.ConfigError, match="'mean' or 'sum'"):
        fxshard.compile(Stack(), reduction="max")  # type: ignore[arg-type]
