"""Checkpoints of tensor-parallel models move between meshes, to one process, and to and from FSDP2."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from tests.checkpoint.zoo import MUON, plain_contents, same
from tests.parallel import Model, fsdp2, parallel, two_by_two
from tests.pool import Pool
from tests.thorough import thorough
from tests.training import deliver, random_gradients

MESHES: dict[str, tuple[int, int]] = {"2 × 2": (2, 2), "4 × 1": (4, 1), "1 × 2": (1, 2), "1": (1, 1)}
STAGE = {"2 × 2": 3, "4 × 1": 2, "1 × 2": 3, "1": 0}


def sharded(name: str, *, other_values: bool = False, **options: Any) -> fxshard.ShardedModule:
    plain = Model()
    if other_values:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.add_(1.0)
    if name == "1":
        return fxshard.shard(plain, **options)
    mesh = init_device_mesh("cpu", MESHES[name], mesh_dim_names=("dp", "tp"))
    return fxshard.shard(parallel(mesh, plain), mesh=mesh["dp"], zero=STAGE[name], **options)


def step(model: fxshard.ShardedModule, number: int) -> dict[str, torch.Tensor]:
    """The parameters after a step with gradients that are the same on every mesh."""
    deliver(model, random_gradients(Model(), number))
    model.optimizer.step()
    model.optimizer.zero_grad()
    return model.full_state_dict()


def saved(name: str, path: Path) -> dict[str, torch.Tensor]:
    model = sharded(name, optimizer=MUON, layout="rows")
    for number in range(2):
        step(model, number)
    fxshard.save(model, path)
    return step(model, 2)


def loaded(name: str, paths: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """Load each into a model with other values, save it again from here, make the next step."""
    found = {}
    for source, path in paths.items():
        model = sharded(name, optimizer=MUON, other_values=True)
        fxshard.load(model, path)
        fxshard.save(model, path.with_name(f"{path.name} on {name}"))
        found[source] = step(model, 2)
    return found


@pytest.mark.shows("T3")
@pytest.mark.parametrize("names", [["2 × 2", "1 × 2", "1"], thorough([*MESHES])], ids=["some", "all"])
def test_any_mesh_to_any_other(ranks: Pool, tmp_path: Path, names: list[str]) -> None:
    paths = {name: tmp_path / f"from {name}" for name in names}
    after = {name: ranks(math.prod(MESHES[name]), saved, name, paths[name])[0] for name in names}
    contents = plain_contents(paths["1"])
    assert "optimizer.state.layers.0.up.weight.momentum_buffer" in contents
    for name, path in paths.items():
        assert same(plain_contents(path), contents) == [], name
        assert same(after[name], after["1"]) == [], name
    for source, name in zip(names, names[1:] + names[:1], strict=True):
        data, tensor = MESHES[name]
        for found in ranks(data * tensor, loaded, name, {source: paths[source]}):
            assert same(found[source], after["1"]) == [], f"{source} → {name}"
        assert same(plain_contents(tmp_path / f"from {source} on {name}"), contents) == [], f"{source} → {name}"


def by_torch(folder: Path) -> dict[str, Any]:
    """What torch's own checkpoints make of state dicts: ours, FSDP2's, and one in the place of the other."""
    mesh = two_by_two()
    model = sharded("2 × 2", optimizer=fxshard.AdamW(), layout="whole")
    full = step(model, 0)
    foreign = torch.optim.AdamW(model.parameters(), lr=1e-3)
    deliver(model, random_gradients(Model(), 1))
    foreign.step()
    state = {"own": model.optimizer.state_dict()["state"], "torch's": foreign.state_dict()["state"]}
    dcp.save({"model": model.state_dict(), **state}, checkpoint_id=folder / "ours")
    theirs = fsdp2(mesh)
    dcp.save({"model": theirs.state_dict()}, checkpoint_id=folder / "FSDP2's")
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "FSDP2's")
    from_fsdp2 = model.full_state_dict()
    into = {"model": theirs.state_dict()}
    dcp.load(into, checkpoint_id=folder / "ours")
    as_fsdp2 = {name: value.full_tensor() for name, value in into["model"].items()}
    return {"full": full, "from FSDP2": from_fsdp2, "as FSDP2": as_fsdp2}


@pytest.mark.shows("T3")
def test_with_torchs_checkpoints(ranks: Pool, tmp_path: Path) -> None:
    found = ranks(4, by_torch, tmp_path)
    contents = plain_contents(tmp_path / "ours")
    model = {key.removeprefix("model."): value for key, value in contents.items() if key.startswith("model.")}
    plain = nn.Module.state_dict(Model())
    for rank in found:
        assert same(rank["from FSDP2"], plain) == []
        assert same(rank["as FSDP2"], model) == []
    names = [name for name, _ in Model().named_parameters()]
    for i, name in enumerate(names):
        for kind in ("own", "torch's"):
            for field in ("exp_avg", "exp_avg_sq"):
                # Moments of a first step are the gradient and its square, up to a factor.
                gradient = random_gradients(Model(), 0 if kind == "own" else 1)[name]
                expected = gradient * 0.1 if field == "exp_avg" else gradient.square() * 0.001
                torch.testing.assert_close(contents[f"{kind}.{i}.{field}"], expected, rtol=1e-5, atol=1e-9)


def from_whole() -> tuple[list[str], list[str], list[str]]:
    """State dicts of a plain model and of its optimizer are loaded into parts."""
    plain = Model()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)

    def plain_step(number: int) -> None:
        for name, gradient in random_gradients(plain, number).items():
            plain.get_parameter(name).grad = gradient
        reference.step()

    plain_step(0)
    model = sharded("2 × 2", optimizer=fxshard.AdamW(lr=1e-2), other_values=True, layout="rows")
    model.load_state_dict(plain.state_dict())
    loaded = model.full_state_dict()
    differences = same(loaded, plain.state_dict())
    model.optimizer.load_state_dict(reference.state_dict())
    ema = fxshard.EMA(model, decay=0.5)
    ema.load_state_dict({name: value + 1 for name, value in loaded.items()})
    averages = same(ema.full_state_dict(), {name: value + 1 for name, value in loaded.items()})
    plain_step(1)
    return differences, same(step(model, 1), plain.state_dict()), averages


@pytest.mark.shows("T3")
def test_state_of_a_plain_model_and_optimizer(ranks: Pool) -> None:
    assert ranks(4, from_whole) == [([], [], [])] * 4


def safetensors(folder: Path) -> tuple[list[str], list[str]]:
    model = sharded("2 × 2", other_values=True)
    fxshard.checkpoint.save_safetensors(model, folder / "ours")
    other = sharded("2 × 2", layout="whole")
    fxshard.checkpoint.load_safetensors(other, folder / "ours")
    return same(other.full_state_dict(), model.full_state_dict()), same(model.full_state_dict(), Model().state_dict())


@pytest.mark.shows("T3")
def test_safetensors(ranks: Pool, tmp_path: Path) -> None:
    for read, other in ranks(4, safetensors, tmp_path):
        assert read == [] and other
    plain = load_file(next((tmp_path / "ours").glob("*.safetensors")))
    assert same(plain, {name: value + 1 for name, value in Model().state_dict().items()}) == []
