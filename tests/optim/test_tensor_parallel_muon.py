"""Muon on tensor-parallel matrices is Muon on whole ones, whichever way they are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fxshard
from fxshard.planner.parts import Piece
from tests.parallel import Model, parallel, two_by_two
from tests.pool import Pool
from tests.training import deliver, random_gradients, step_beside

ADAMW = fxshard.AdamW(lr=1e-3, eps=1e-4, weight_decay=0.1)
MUON = fxshard.Muon(lr=2e-2, weight_decay=0.1, adamw=ADAMW)
# Parts of different shapes have different scales, and boundaries that tensor parallelism does not respect.
SPLIT = fxshard.Muon(lr=2e-2, split={"*.up.weight": (40, 88)}, scale="spectral", adamw=ADAMW)


class Stacked(nn.Module):
    """Stacks of experts' matrices, cut between experts, along rows, along columns, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ParameterDict({name: torch.randn(4, 6, 10) for name in ("experts", "rows", "columns", "all")})


def stacked(mesh: Any) -> nn.Module:
    model = Stacked()
    for name, placement in zip(model.blocks, (Shard(0), Shard(1), Shard(2), Replicate()), strict=True):
        model.blocks[name] = nn.Parameter(distribute_tensor(model.blocks[name].detach(), mesh["tp"], [placement]))
    return model


def against_plain(choice: fxshard.Muon, made: nn.Module, plain: nn.Module, **options: Any) -> list[str]:
    """Step sharded and, beside it, plain, with the same full gradients; returns what differs in any bit."""
    model = fxshard.shard(made, optimizer=choice, **options)
    reference = choice.build(plain)
    different: list[str] = []
    for step in range(2):
        grads = random_gradients(plain, step)
        deliver(model, grads)
        different += step_beside(model, plain, reference, grads, step)
    return different


def stages_and_layouts() -> dict[str, list[str]]:
    mesh, found = two_by_two(), {}
    for zero, layout in [(0, "auto"), (1, "whole"), (1, "rows"), (2, "rows"), (3, "whole"), (3, "rows")]:
        for name, choice in (("plain", MUON), ("split", SPLIT)):
            options: dict[str, Any] = {"zero": zero, "layout": layout, "mesh": mesh["dp"]}
            found[f"ZeRO-{zero} {layout} {name}"] = against_plain(choice, parallel(mesh), Model(), **options)
    found["experts"] = against_plain(MUON, stacked(mesh), Stacked(), mesh=mesh["dp"])
    return found


@pytest.mark.thorough
@pytest.mark.shows("T4")
def test_equals_the_plain_step_on_the_full_gradient_bitwise(ranks: Pool) -> None:
    for found in ranks(4, stages_and_layouts):
        assert found == {name: [] for name in found}


def alone() -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return against_plain(MUON, parallel(mesh), Model(), mesh=mesh["dp"])


@pytest.mark.shows("T4")
def test_without_data_parallel_ranks(ranks: Pool) -> None:
    assert ranks(2, alone) == [[], []]


def spoilt() -> tuple[bool, bool]:
    """One tensor-parallel rank has a gradient that is not finite: all leave the step out."""
    mesh = two_by_two()
    model = fxshard.shard(parallel(mesh), mesh=mesh["dp"], optimizer=fxshard.Muon(nan="skip"))
    before = model.full_state_dict()
    deliver(model, random_gradients(Model(), 0))
    if dist.get_rank() == 3:
        rows = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        next(part for part in rows if part.numel()).view(-1)[0] = torch.nan
    with pytest.warns(RuntimeWarning, match="not finite"):
        model.optimizer.step()
    after = model.full_state_dict()
    return all(torch.equal(after[name], value) for name, value in before.items()), model.optimizer.skipped_steps == 1


@pytest.mark.shows("T4")
def test_gradients_that_are_not_finite_on_one_rank_count_on_all(ranks: Pool) -> None:
    assert ranks(4, spoilt) == [(True, True)] * 4


def test_what_is_cut() -> None:
    assert [Piece((4, 6), dim, 2, 0).cuts_matrices for dim in (None, 0, 1)] == [False, True, True]
    assert [Piece((8, 4, 6), dim, 2, 0).cuts_matrices for dim in (None, 0, 1, 2)] == [False, False, True, True]
    assert not Piece((4, 6), 0, 1, 0).cuts_matrices
