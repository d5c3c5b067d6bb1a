"""What tensor-parallel models cannot have is refused on every rank, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fxshard
from tests.parallel import parallel, two_by_two
from tests.pool import Pool


def one_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))


def placed(mesh: DeviceMesh, placement: Any, rows: int = 8) -> nn.Module:
    model = nn.Linear(4, rows)
    local = model.weight.detach()
    weight = DTensor.from_local(local, mesh, [placement]) if isinstance(placement, Partial) else None
    model.weight = nn.Parameter(distribute_tensor(local, mesh, [placement]) if weight is None else weight)
    return model


def no_mesh() -> None:
    fxshard.shard(parallel(one_by_two()))


def same_dimension() -> None:
    mesh = one_by_two()
    fxshard.shard(parallel(mesh), mesh=mesh["tp"])


def whole_mesh() -> None:
    mesh = one_by_two()
    fxshard.shard(parallel(mesh), mesh=mesh)


def second_moments_of_rows() -> None:
    mesh = one_by_two()
    fxshard.shard(parallel(mesh), mesh=mesh["dp"], optimizer=fxshard.NorMuon())


def unnamed_mesh() -> None:
    fxshard.shard(placed(init_device_mesh("cpu", (2,)), Shard(0)), mesh=one_by_two()["dp"])


def two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    model = nn.Linear(4, 8)
    both = [Replicate(), Shard(0)]
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["cp", "tp"], both))
    fxshard.shard(model, mesh=mesh["dp"])


def two_meshes() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "ep", "tp"))
    model = nn.Sequential(placed(mesh["ep"], Shard(0)), placed(mesh["tp"], Shard(0)))
    fxshard.shard(model, mesh=mesh["dp"])


def uneven_parts() -> None:
    mesh = one_by_two()
    fxshard.shard(placed(mesh["tp"], Shard(0), rows=5), mesh=mesh["dp"])


def partial() -> None:
    mesh = one_by_two()
    fxshard.shard(placed(mesh["tp"], Partial()), mesh=mesh["dp"])


def sharded_buffer() -> None:
    mesh = one_by_two()
    model = placed(mesh["tp"], Shard(0))
    model.register_buffer("mask", distribute_tensor(torch.ones(8), mesh["tp"], [Shard(0)]))
    fxshard.shard(model, mesh=mesh["dp"])


def graph_breaks() -> None:
    mesh = one_by_two()
    fxshard.compile(parallel(mesh), mesh=mesh["dp"], fullgraph=False)


def quantized() -> None:
    mesh = one_by_two()
    fxshard.shard(parallel(mesh), mesh=mesh["dp"], precision=fxshard.Float8())


REFUSED: dict[Callable[[], None], str] = {
    no_mesh: 'mesh=mesh["dp"]',
    same_dimension: "dimensions of one mesh",
    whole_mesh: "dimensions of one mesh",
    second_moments_of_rows: "use fxshard.Muon there",
    unnamed_mesh: "dimensions of one mesh",
    two_dimensions: "the tensor-parallel dimension alone",
    two_meshes: "different meshes",
    uneven_parts: "which are not equal",
    partial: "expected Shard or Replicate",
    sharded_buffer: "buffers are the same on all ranks",
    graph_breaks: "captured as one graph",
    quantized: "use Precision",
}


def messages() -> dict[str, str]:
    found = {}
    for function in REFUSED:
        try:
            function()
            found[function.__name__] = "nothing was raised"
        except fxshard.ConfigError as error:
            found[function.__name__] = str(error)
    return found


def test_what_is_refused_on_every_rank(ranks: Pool) -> None:
    for found in ranks(2, messages):
        for function, expected in REFUSED.items():
            assert expected in found[function.__name__], function.__name__


def other_stage_on_one_tensor_parallel_rank() -> str:
    """Data-parallel ranks agree with each other, but not with those of the other tensor-parallel rank."""
    mesh = two_by_two()
    with pytest.raises(fxshard.RankDivergenceError) as error:
        fxshard.shard(parallel(mesh), mesh=mesh["dp"], zero=3 if mesh["tp"].get_local_rank() else 2)
    return str(error.value)


def cut_otherwise_on_one_rank() -> str:
    """Parts of equal shapes, along other dimensions."""
    mesh = two_by_two()
    model = nn.Linear(8, 8, bias=False)
    part = model.weight.detach()[:4] if dist.get_rank() else model.weight.detach()[:, :4].contiguous().view(4, 8)
    placement = Shard(0) if dist.get_rank() else Shard(1)
    shape = torch.Size([8, 8] if dist.get_rank() else [4, 16])
    weight = DTensor.from_local(part, mesh["tp"], [placement], run_check=False, shape=shape, stride=(shape[1], 1))
    model.weight = nn.Parameter(weight)
    with pytest.raises(fxshard.RankDivergenceError) as error:
        fxshard.shard(model, mesh=mesh["dp"])
    return str(error.value)


def failure_on_one_rank() -> str:
    mesh = two_by_two()
    with pytest.raises(fxshard.FxshardError) as error:
        fxshard.shard(parallel(mesh), mesh=mesh["dp"], reduction="max" if dist.get_rank() == 3 else "mean")
    return str(error.value)


@pytest.mark.shows("T1")
def test_ranks_of_both_dimensions_agree_before_they_communicate(ranks: Pool) -> None:
    for found in ranks(4, other_stage_on_one_tensor_parallel_rank):
        assert "the parameter plan is not what it is on rank" in found
    for found in ranks(4, cut_otherwise_on_one_rank):
        assert "weight: (8, 8) in 2 parts along 0" in found and "weight: (4, 16) in 2 parts along 1" in found
    for rank, found in enumerate(ranks(4, failure_on_one_rank)):
        assert "reduction='max'" in found and ("rank 3 failed" in found) is (rank != 3)


def seeded_by_rank() -> list[bool]:
    """Ranks begin with values of their own: those of the first count, part by part and for what is replicated."""
    mesh = two_by_two()
    made = parallel(mesh)
    with torch.no_grad():
        for parameter in made.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.add_(dist.get_rank())
    # Parts of the first data-parallel rank's two tensor-parallel ranks; what both hold is that of the first.
    tensor = mesh["tp"].get_local_rank()
    first = parallel(mesh)
    expected = {}
    for name, parameter in first.named_parameters():
        value = parameter.detach()
        if isinstance(value, DTensor):
            part = value.to_local() + (tensor if value.placements[0].is_shard() else 0)
            value = DTensor.from_local(part, mesh["tp"], value.placements).full_tensor()
        expected[name] = value
    found = fxshard.shard(made, mesh=mesh["dp"]).full_state_dict()
    return [torch.equal(found[name], value) for name, value in expected.items()]


def test_the_first_ranks_values_win(ranks: Pool) -> None:
    for found in ranks(4, seeded_by_rank):
        assert found and all(found)
