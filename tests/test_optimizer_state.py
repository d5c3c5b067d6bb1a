"""Optimizer state in fewer bits and on the host, on several ranks: the bits of one, moved by any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from tests.optim.state_reference import Reference, expected
from tests.optim.state_runs import LR, moments, momentum_reference, same, sharded, train, wrong
from tests.pool import Pool
from tests.stack import wide, wide_batch
from tests.thorough import thorough
from tests.training import deliver, full_gradients, random_gradients


def on_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"wrong": []}
    for zero, (format, place) in ((1, ("8bit", "none")), (3, ("bf16", "host")), (3, ("8bit", "host"))):
        choice = fxshard.AdamW(lr=LR, state=format, offload=place)
        model = sharded(choice, zero=zero)
        after = train(model, range(3))
        found["wrong"] += [f"{zero} {format} {name}" for name in wrong(after, expected(format, range(3)), format)]
        plans = [bucket.plan for bucket in model._sharding.buckets]
        found[f"{format} {place}"] = (
            sum(model.optimizer.state_bytes().values()),  # type: ignore[attr-defined]
            sum(plan.moment_bytes for plan in plans),
        )
    fxshard.save(model, folder / "ours")
    state = get_optimizer_state_dict(model, model.optimizer)
    dcp.save({"optimizer": state}, checkpoint_id=folder / "dcp")
    other = sharded(choice, zero=3)
    other.load_state_dict(model.full_state_dict())
    into = get_optimizer_state_dict(other, other.optimizer)
    dcp.load({"optimizer": into}, checkpoint_id=folder / "dcp")
    set_optimizer_state_dict(other, other.optimizer, into)
    if not same(moments(other), moments(model)):
        found["wrong"].append("dcp")
    return found


@pytest.mark.shows("M5")
def test_ranks_agree_with_the_reference_and_with_the_plan(ranks: Pool, tmp_path: Path) -> None:
    """And one process goes on from what two saved, with the bits of a run that was never stopped."""
    results = ranks(2, on_ranks, tmp_path)
    for result in results:
        assert result["wrong"] == []
    for key in ("8bit none", "bf16 host", "8bit host"):
        assert max(result[key][0] for result in results) == results[0][key][1], key
    model = sharded(fxshard.AdamW(lr=LR, state="8bit"))
    fxshard.load(model, tmp_path / "ours")
    assert wrong(train(model, range(3, 5)), expected("8bit", range(5)), "8bit") == []


def compiled(zero: int, place: str) -> list[str]:
    """Whole steps, in which buckets are gathered ahead as soon as they are updated."""
    found = []
    choice = fxshard.AdamW(lr=LR, state="8bit", offload=place)
    model = fxshard.compile(wide(), zero=zero, optimizer=choice, lowering="eager")
    matrices = {name: p for name, p in wide().named_parameters() if p.ndim == 2}
    wanted = {name: Reference(name, p, "8bit", p.shape[-1]) for name, p in matrices.items()}
    for step in range(2):
        loss = model(*wide_batch(step, dist.get_rank()))
        plain = wide()
        plain.load_state_dict(model.full_state_dict())
        if not torch.allclose(loss, plain(*wide_batch(step, dist.get_rank())), rtol=1e-5):
            found.append(f"{zero} {place} the loss of step {step}")
        loss.backward()
        grads = full_gradients(model)
        model.optimizer.step()
        model.optimizer.zero_grad()
        for name, reference in wanted.items():
            reference.update(grads[name], LR)
    after = model.full_state_dict()
    found += [f"{zero} {place} {name}" for name, r in wanted.items() if not np.array_equal(after[name].view(-1), r.p)]
    return found


@pytest.mark.shows("M5")
@pytest.mark.parametrize(("zero", "place"), [(3, "host"), thorough(1, "none")])
def test_compiled_steps_follow_the_reference(ranks: Pool, zero: int, place: str) -> None:
    assert ranks(2, compiled, zero, place) == [[]] * 2


def replicated() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for shared, place in ((True, "host"), (False, "none")):
        choice = fxshard.AdamW(lr=LR, state="8bit", offload=place, over_replicas=shared)
        model = sharded(choice, zero=2, mesh=mesh)
        after = train(model, range(3))
        found += [f"{shared} {place} {name}" for name in wrong(after, expected("8bit", range(3)), "8bit")]
    return found


@pytest.mark.shows("M5")
def test_hsdp_with_and_without_shared_state(ranks: Pool) -> None:
    assert ranks(4, replicated) == [[]] * 4


def muon_on_ranks() -> list[str]:
    found = []
    for layout, place in (("rows", "none"), ("rows", "host"), ("auto", "none")):
        model = fxshard.shard(wide(), optimizer=fxshard.Muon(lr=LR, state="8bit", offload=place), zero=3, layout=layout)
        for step in range(2):
            deliver(model, random_gradients(wide(), step))
            model.optimizer.step()
        after, wanted = model.full_state_dict(), momentum_reference("8bit", range(2))
        found += [f"{layout} {place} {name}" for name in wanted if not torch.equal(after[name], wanted[name])]
    return found


@pytest.mark.shows("M5")
def test_muon_on_ranks_whether_matrices_travel_or_not(ranks: Pool) -> None:
    assert ranks(2, muon_on_ranks) == [[]] * 2
