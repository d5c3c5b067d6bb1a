"""NorMuon against the paper's formulas, and its state in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard._torch.errors import ConfigError, StateError
from fxshard.optim import muon_rule as rule
from fxshard.optim.row_moments import row_factors_
from tests.optim.normuon_reference import Reference
from tests.pool import Pool
from tests.test_muon import SPLIT, against_plain, fused, short
from tests.thorough import thorough
from tests.training import stepped

ADAMW = fxshard.AdamW(lr=1e-3, eps=1e-4, weight_decay=0.1)
CHOICE = fxshard.NorMuon(lr=2e-2, weight_decay=0.1, beta2=0.9, adamw=ADAMW)


def uneven(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """A gradient whose rows differ in size by a factor of a hundred: what normalizing by rows is for."""
    torch.manual_seed(seed)
    return torch.randn(shape) * torch.logspace(-1, 1, shape[0]).unsqueeze(1)


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (20, 20)])
@pytest.mark.parametrize("scale", ["spectral", "rms"])
def test_follows_the_paper(shape: tuple[int, int], scale: str) -> None:
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    begin = model[0].weight.detach().clone()
    factor = max(1.0, shape[0] / shape[1]) ** 0.5 if scale == "spectral" else 0.2 * max(shape) ** 0.5
    wanted = Reference(begin, 0.1, weight_decay=0.1, scale=factor)
    plain = Reference(begin, 0.1, weight_decay=0.1, scale=factor, beta2=0.0)
    optimizer = fxshard.NorMuon(lr=0.1, weight_decay=0.1, scale=scale, use=lambda name, shape: True).build(model)
    for step in range(6):
        model[0].weight.grad = uneven(shape, step)
        optimizer.step()
        for reference in (wanted, plain):
            reference.step(uneven(shape, step))
    moved = (wanted.weight - begin).norm()
    assert (model[0].weight.double() - wanted.weight).norm() / moved < 0.01  # Newton–Schulz is in bf16
    assert (plain.weight - wanted.weight).norm() / moved > 0.03  # the second moments matter
    second = optimizer.state[model[0].weight]["second_momentum_buffer"]
    assert second.shape == (shape[0], 1)
    torch.testing.assert_close(second.squeeze(1).double(), wanted.second, rtol=0.03, atol=0)


def test_rows_end_alike_and_the_norm_is_muons() -> None:
    """With no memory (beta2 = 0) every row has the same norm, and the matrix the norm that Muon gives it."""
    moved = {}
    for name, made in (("muon", fxshard.Muon(lr=1.0)), ("normuon", fxshard.NorMuon(lr=1.0, beta2=0.0))):
        model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))
        nn.init.zeros_(model[0].weight)
        optimizer = made.build(model)
        model[0].weight.grad = torch.diag(torch.logspace(-4, 0, 24)) @ uneven((24, 24), 0)
        optimizer.step()
        moved[name] = model[0].weight.detach().clone()
    rows = moved["normuon"].norm(dim=1)
    assert rows.max() / rows.min() < 1.001 < 1.05 < moved["muon"].norm(dim=1).max() / moved["muon"].norm(dim=1).min()
    torch.testing.assert_close(moved["normuon"].norm(), moved["muon"].norm())


def stages_and_layouts() -> dict[str, list[str]]:
    found = {}
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layout in ("whole", "rows"):
            found[f"HSDP {layout}"] = against_plain(CHOICE, zero=3, layout=layout, mesh=mesh)
        return found
    for zero, layout in ((0, "auto"), (1, "rows"), (2, "whole"), (3, "rows")):
        found[f"ZeRO-{zero} {layout}"] = against_plain(CHOICE, zero=zero, layout=layout)
    cut = fxshard.NorMuon(lr=2e-2, adamw=ADAMW, split=SPLIT.split, groups={"*.o.weight": {"beta2": 0.5}})
    for layout in ("whole", "rows"):
        found[f"fused {layout}"] = against_plain(cut, fused, zero=3, layout=layout)
    return found


@pytest.mark.parametrize("world", [3, thorough(4)])
def test_equals_the_plain_step_bitwise_in_every_layout(ranks: Pool, world: int) -> None:
    for found in ranks(world, stages_and_layouts):
        assert found == {name: [] for name in found}


def made(layout: Any, **choices: Any) -> fxshard.ShardedModule:
    choice = fxshard.NorMuon(lr=2e-2, adamw=ADAMW, **choices)
    return fxshard.shard(short(), optimizer=choice, zero=3, layout=layout)


def saved(folder: Path, layout: str) -> None:
    model = made(layout)
    stepped(model, short, range(2))
    fxshard.save(model, folder / "checkpoint")


def resumed(folder: Path, layout: str) -> dict[str, torch.Tensor]:
    model = made(layout)
    fxshard.load(model, folder / "checkpoint")
    return stepped(model, short, range(2, 4))


@pytest.mark.thorough
def test_checkpoints_move_between_numbers_of_ranks(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, saved, tmp_path, "rows")
    wanted = stepped(made("rows"), short, range(4))
    for layout in ("rows", "whole"):
        for found in ranks(2, resumed, tmp_path, layout):
            assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def kept_otherwise() -> dict[str, bool]:
    """Where the momentum is exact, the host changes nothing; in fewer bits state dicts carry a run on."""
    found = {}
    for layout in ("rows", "whole"):
        plain, host = made(layout), made(layout, offload="host")
        a, b = (stepped(model, short, range(3)) for model in (plain, host))
        found[f"host {layout}"] = all(torch.equal(a[name], b[name]) for name in a)
        one, other = made(layout, state="8bit"), made(layout, state="8bit", offload="host")
        stepped(one, short, range(2))
        other.load_state_dict(one.state_dict())
        other.optimizer.load_state_dict(one.optimizer.state_dict())
        a, b = (stepped(model, short, range(2, 4)) for model in (one, other))
        found[f"8bit {layout}"] = all(torch.equal(a[name], b[name]) for name in a)
    sizes = model_bytes(made("rows")), model_bytes(made("rows", state="8bit"))
    found["counted"] = all(planned >= held for planned, held in sizes)
    return found


def model_bytes(model: fxshard.ShardedModule) -> tuple[int, int]:
    """Bytes of moments that were planned, and that there are on this rank."""
    buckets = model._sharding.buckets
    return sum(bucket.plan.moment_bytes for bucket in buckets), sum(model.optimizer.state_bytes().values())


@pytest.mark.thorough
def test_state_in_fewer_bits_and_on_the_host(ranks: Pool) -> None:
    for found in ranks(2, kept_otherwise):
        assert found == dict.fromkeys(found, True)


def test_a_refused_step_changes_nothing() -> None:
    """On a GPU a step is refused by a number that kernels read."""
    for refused, moves in ((torch.ones(()), False), (torch.zeros(()), True)):
        second = torch.rand(12, 1)
        before = second.clone()
        pieces = rule.split_matrices(torch.randn(12, 6, dtype=torch.bfloat16), fxshard.Split(3))
        row_factors_([pieces], [second], [fxshard.Split(3)], 0.9, refused)
        assert torch.equal(second, before) is not moves


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NorMuon\(beta2=1.0\) is out of range"):
        fxshard.NorMuon(beta2=1.0)
    with pytest.raises(ConfigError, match="without second moments"):
        fxshard.NorMuon(beta2=None)
    with pytest.raises(ConfigError, match="'beta2' is none of"):
        fxshard.Muon(groups={"*": {"beta2": 0.9}})
    muon = fxshard.Muon().build(short())
    model = short()
    normuon = fxshard.NorMuon().build(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    normuon.step()
    with pytest.raises(StateError, match=r"has \['momentum_buffer', 'second_momentum_buffer'\], this optimizer needs"):
        muon.load_state_dict(normuon.state_dict())
