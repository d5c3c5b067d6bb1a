"""Checkpoints move between numbers of ranks, stages and layouts, bit by bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.checkpoint import folder
from fxshard.checkpoint.planners import LoadRows, Target
from fxshard.checkpoint.reader import RowReader
from tests.checkpoint.zoo import ADAMW, MUON, Zoo, plain_contents, same, train, zoo
from tests.pool import Pool
from tests.toy import Mlp

WORLDS = (1, 2, 3, 4)
SAVED: dict[int, dict[str, Any]] = {
    1: {"zero": 3},
    2: {"zero": 3, "layout": "rows"},
    3: {"zero": 2, "layout": "whole"},
    4: {"zero": 3, "layout": "rows", "hsdp": True},
}
LOADED: dict[int, dict[str, Any]] = {
    1: {"zero": 1},
    2: {"zero": 0},
    3: {"zero": 3, "layout": "rows"},
    4: {"zero": 3, "layout": "whole"},
}


def sharded(seed: int = 0, hsdp: bool = False, **options: Any) -> fxshard.ShardedModule:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hsdp else None
    return fxshard.shard(zoo(seed), optimizer=MUON, mesh=mesh, **options)


def saved(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(parameters when saved, parameters after the next step)"""
    model = sharded(**SAVED[dist.get_world_size()])
    model.get_buffer("norm.running_mean").fill_(3 + dist.get_rank())
    before = train(model, range(2))
    if dist.get_world_size() == 2:  # or this would show nothing about uneven rows
        assert model.get_parameter("emb.weight").to_local().shape[0] not in (0, 18, 19, 37)
    fxshard.save(model, path, extra={"rank": dist.get_rank()})
    return before, train(model, range(2, 3))


def loaded(paths: dict[int, Path]) -> dict[int, tuple[dict[str, torch.Tensor], Any, list[str]]]:
    """Load each into a model with other values, save it again from here, make the next step."""
    world, found = dist.get_world_size(), {}
    for source, path in paths.items():
        model = sharded(seed=1, **LOADED[world])
        was = fxshard.load(model, path)
        fxshard.save(model, path.with_name(f"{path.name}-on-{world}"))
        found[source] = (train(model, range(2, 3)), was.extra, was.notes)
    return found


@pytest.mark.shows("C1", "C2")
def test_any_number_of_ranks_to_any_other(ranks: Pool, tmp_path: Path) -> None:
    """With the same gradients, the next step is the same bit by bit, whatever the ranks, stages and layouts."""
    paths = {world: tmp_path / f"from-{world}" for world in WORLDS}
    originals = {world: ranks(world, saved, paths[world]) for world in WORLDS}
    contents = {world: plain_contents(path) for world, path in paths.items()}
    for world in WORLDS:
        before = originals[world][0][0]
        model_part = {k.removeprefix("model."): v for k, v in contents[world].items() if k.startswith("model.")}
        assert same(model_part, before) == [], world
        assert model_part["norm.running_mean"].tolist() == [3.0] * 24  # the first rank's
        zoo(7).load_state_dict(model_part)
    assert "optimizer.state.layers.0.weight.momentum_buffer" in contents[2]
    assert contents[3]["optimizer.state.odd.bias.step"] == 2
    for world in WORLDS[1:]:
        assert same(contents[1], contents[world]) == [], world
    for world in WORLDS:
        other = WORLDS[world % len(WORLDS)]  # one rank more, or all others less
        sources = (world, other) if world == 2 else (other,)
        for rank, found in enumerate(ranks(world, loaded, {source: paths[source] for source in sources})):
            for source, (after, extra, notes) in found.items():
                assert same(after, originals[source][0][1]) == [], f"{source} → {world}"
                assert extra == {"rank": rank if source == world else 0}
                assert bool(notes) is (source != world)  # random states belong to ranks
        for source in sources:
            again = plain_contents(tmp_path / f"from-{source}-on-{world}")
            assert same(again, contents[source]) == [], f"{source} → {world}"


def with_torch_optimizer(path: Path, save: bool) -> dict[str, torch.Tensor]:
    model = fxshard.shard(zoo(0 if save else 1), zero=3, layout="rows")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2 if save else 1.0)
    if save:
        train(model, range(2), optimizer)
        fxshard.save(model, path, optimizer=optimizer)
    else:
        fxshard.load(model, path, optimizer=optimizer)
    return train(model, range(2, 3), optimizer)


def test_torch_optimizers(ranks: Pool, tmp_path: Path) -> None:
    """State that the optimizer has not made yet is made; the learning rate continues as saved."""
    path = tmp_path / "step-2"
    straight = ranks(2, with_torch_optimizer, path, True)[0]
    for after in ranks(3, with_torch_optimizer, path, False):
        assert same(after, straight) == []
    alone = with_torch_optimizer(path, False)
    assert same(alone, straight) == []


def test_only_the_rows_that_are_needed_are_read(tmp_path: Path) -> None:
    weight = torch.nn.Linear(64, 8192)
    expected = weight.weight.detach()[5000:5010].clone()
    fxshard.save(fxshard.shard(weight), tmp_path / "a")
    rows = torch.empty(10, 64)
    before = _bytes_read()
    planner = LoadRows([Target("model.weight", (5000, 0), rows)], [])
    reader = RowReader(tmp_path / "a", folder.read(tmp_path / "a")["files"])
    torch.distributed.checkpoint.load({}, storage_reader=reader, planner=planner, no_dist=True)
    assert torch.equal(rows, expected)
    assert _bytes_read() - before < 100_000  # of two million


def _bytes_read() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


@pytest.mark.shows("C2")
def test_plain_module_and_back(ranks: Pool, tmp_path: Path) -> None:
    """What torch.distributed.checkpoint and load_state_dict make of it in a process that knows nothing of fxshard."""
    model = fxshard.shard(zoo(), optimizer=ADAMW)
    full = train(model, range(1))
    fxshard.save(model, tmp_path / "a")
    plain = Zoo()
    state = {"model": plain.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    plain.load_state_dict(state["model"])
    assert same(plain.state_dict(), full) == []
    other = fxshard.shard(zoo(3))
    other.load_state_dict(plain.state_dict())
    assert same(other.full_state_dict(), full) == []


def test_another_precision_of_compute(tmp_path: Path) -> None:
    """Masters are what is saved: the dtype of compute may change."""
    model = fxshard.shard(Mlp(), optimizer=MUON, precision=fxshard.Precision(param=torch.bfloat16))
    train(model, range(2), plain=Mlp())
    fxshard.save(model, tmp_path / "a")
    after = train(model, range(2, 3), plain=Mlp())
    other = fxshard.shard(Mlp(), optimizer=MUON)
    fxshard.load(other, tmp_path / "a")
    assert same(train(other, range(2, 3), plain=Mlp()), after) == []
