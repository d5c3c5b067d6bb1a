"""Checkpoints of experts that have one name and are others on other ranks: ``groups=``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxshard
from fxshard.checkpoint import load_megatron, load_safetensors, save_safetensors
from tests.pool import Pool
from tests.test_groups import Moe
from tests.training import deliver, random_gradients

safetensors = pytest.importorskip("safetensors.torch")


def sharded(parts: int, zero: int, *, fill: float | None = None) -> fxshard.ShardedModule:
    """On four ranks, of which ``parts`` have different experts; all parameters and buffers are ``fill``."""
    mesh = init_device_mesh("cpu", (4 // parts, parts), mesh_dim_names=("ep_dp", "ep"))
    plain = Moe(mesh.get_group("ep").group_name, mesh.get_local_rank("ep"), parts)
    if fill is not None:
        with torch.no_grad():
            for value in (*plain.parameters(), *plain.buffers()):
                value.fill_(fill)
    groups = {"*.experts.*": mesh["ep_dp"]}
    return fxshard.shard(plain, zero=zero, groups=groups, optimizer=fxshard.AdamW(lr=1e-2))


def step(model: fxshard.ShardedModule, number: int) -> None:
    """On gradients for ranks that have two experts each."""
    deliver(model, random_gradients(Moe(ranks=2), number))
    model.optimizer.step()
    model.optimizer.zero_grad()


def experts(state: dict[str, Any]) -> torch.Tensor:
    """All four, from the ranks that have two of them each."""
    own: list[Any] = [None] * 4
    dist.all_gather_object(own, state["layers.0.experts.weight"])
    return torch.cat(own[:2])


def moved(folder: Path) -> dict[str, Any]:
    model = sharded(2, zero=3)
    step(model, 0)
    fxshard.save(model, folder / "saved")
    again, more = sharded(2, zero=1, fill=7.0), sharded(4, zero=2, fill=7.0)
    for other in (again, more):
        fxshard.load(other, folder / "saved")
    loaded = more.full_state_dict()["layers.0.experts.weight"]
    before = experts(model.full_state_dict())
    for each in (model, again):
        step(each, 1)
    mine, theirs = model.full_state_dict(), again.full_state_dict()
    load_safetensors(more, folder / "together")
    with pytest.raises(fxshard.ConfigError, match=r"layers\.0\.experts\.weight is another parameter on other ranks"):
        save_safetensors(model, folder / "files")
    return {
        "continued": [name for name, value in mine.items() if not torch.equal(value, theirs[name])],
        "experts": before,
        "of four": torch.equal(loaded, before[dist.get_rank() :][:1]),
        "from files": more.full_state_dict()["layers.0.experts.weight"],
        "buffer": more.full_state_dict()["layers.0.experts.bias"].mean().item(),
    }


def test_every_rank_finds_its_experts(ranks: Pool, tmp_path: Path) -> None:
    """On as many ranks, on ranks that have fewer experts each, and in one process that has them all."""
    files = Moe().state_dict()
    save_safetensors(fxshard.shard(Moe()), tmp_path / "together")
    found = ranks(4, moved, tmp_path)
    for rank, each in enumerate(found):
        assert not each["continued"], "a step after loading is that of the model that was saved"
        assert torch.equal(each["from files"][0], files["layers.0.experts.weight"][rank])
        assert each["of four"] and each["buffer"] == pytest.approx(0.1 if rank < 2 else 0.2)
    alone = fxshard.shard(Moe(), optimizer=fxshard.AdamW(lr=1e-2))
    fxshard.load(alone, tmp_path / "saved")
    assert torch.equal(alone.full_state_dict()["layers.0.experts.weight"], found[0]["experts"])


def loaded(folder: Path) -> list[Any]:
    """What is said of another rank's file, then the experts that this rank finds in files or names of its own."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep_dp", "ep"))
    rank = dist.get_rank()
    model = fxshard.shard(Moe(mesh.get_group("ep").group_name, rank, 2), groups={"*.experts.*": mesh["ep_dp"]})
    name, whole = "layers.0.experts.weight", Moe().state_dict()
    first = folder / "0.safetensors"
    with pytest.raises(fxshard.CheckpointError) as error:
        load_safetensors(model, first)
    found: list[Any] = [str(error.value)]
    names = {key: key for key in whole if ".experts." not in key}
    names |= {f"{rank}.weight": name, f"{rank}.bias": "layers.0.experts.bias"}
    for load in (
        lambda: load_safetensors(model, folder / f"{rank}.safetensors"),
        lambda: load_safetensors(model, folder / "apart.safetensors", rename=names.get),
        lambda: load_megatron(model, folder / "together", {key: key for key in whole}),
    ):
        model.load_state_dict({key: torch.zeros_like(value) for key, value in model.full_state_dict().items()})
        load()
        found.append(torch.equal(model.full_state_dict()[name], whole[name].chunk(2)[rank]))
    return found


def test_no_rank_takes_experts_of_others_for_its_own(ranks: Pool, tmp_path: Path) -> None:
    """One file under one name has them for one rank alone; ranks with files, or names, of their own find theirs."""
    whole = Moe().state_dict()
    own = [{k: v.chunk(2)[i].clone() if ".experts." in k else v for k, v in whole.items()} for i in range(2)]
    for i, state in enumerate(own):
        safetensors.save_file(state, tmp_path / f"{i}.safetensors")
    apart = {f"{i}.{key[17:]}": state[key] for i, state in enumerate(own) for key in state if ".experts." in key}
    shared = {key: value for key, value in whole.items() if ".experts." not in key}
    safetensors.save_file({**shared, **apart}, tmp_path / "apart.safetensors")
    dcp.save(whole, checkpoint_id=tmp_path / "together", no_dist=True)
    for said, *right in ranks(2, loaded, tmp_path):
        assert "layers.0.experts.weight is another parameter on other ranks" in said
        assert "0.safetensors too" in said and right == [True] * 3


def with_tensor_parallel(folder: Path) -> None:
    """Ranks have half of the experts each, and half of the rows of other layers."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("ep_dp", "ep", "tp"))
    plain = Moe(mesh.get_group("ep").group_name, mesh.get_local_rank("ep"), 2)
    del plain.layers[0].experts.bias
    parallelize_module(plain, mesh["tp"], {"layers.*.dense": ColwiseParallel(output_layouts=Replicate())})
    data = mesh["ep_dp", "ep"]._flatten("dp")
    fxshard.save(fxshard.shard(plain, mesh=data, groups={"*.experts.*": mesh["ep_dp"]}), folder)


def test_tensor_parallel_ranks_have_the_same_experts(ranks: Pool, tmp_path: Path) -> None:
    ranks(4, with_tensor_parallel, tmp_path / "saved")
    plain = Moe()
    del plain.layers[0].experts.bias
    before = copy.deepcopy(plain.state_dict())
    for parameter in plain.parameters():
        parameter.data.zero_()
    alone = fxshard.shard(plain)
    fxshard.load(alone, tmp_path / "saved")
    torch.testing.assert_close(alone.full_state_dict(), before, rtol=0, atol=0)


class WithScale(Moe):
    """Experts have a number of their own, without dimensions."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        for layer in self.layers:
            layer.experts.scale = torch.nn.Parameter(torch.tensor(1.0))


def refused_numbers(folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep_dp", "ep"))
    plain = WithScale(mesh.get_group("ep").group_name, mesh.get_local_rank("ep"), 2)
    model = fxshard.shard(plain, groups={"*.experts.*": mesh["ep_dp"]})
    said = []
    missing = folder / ("missing.safetensors" if dist.get_rank() else "files")
    for call in (
        lambda: fxshard.save(model, folder / "again"),
        lambda: fxshard.load(model, folder / "saved"),
        lambda: load_safetensors(model, folder / "files"),
        lambda: load_safetensors(model, missing),
    ):
        with pytest.raises(fxshard.CheckpointError) as error:
            call()
        said.append(str(error.value))
    return said


def test_numbers_without_dimensions_are_refused_in_words_of_what_was_called(ranks: Pool, tmp_path: Path) -> None:
    """And a rank that cannot read its files does not wait for one that was refused."""
    alone = fxshard.shard(WithScale())
    fxshard.save(alone, tmp_path / "saved")
    save_safetensors(alone, tmp_path / "files")
    for said in ranks(2, refused_numbers, tmp_path):
        saving, *loading = said
        assert all("layers.0.experts.scale is a single number" in each for each in said)
        assert "and cannot be saved: give it a dimension" in saving
        for each in loading:
            assert "saved" not in each.partition("single number")[2]
            assert "what is loaded has one for all of them: give it a dimension" in each
        assert "missing.safetensors is missing (rank 1)" in loading[-1]
