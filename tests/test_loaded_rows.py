"""Files that ``torch.save`` wrote on every rank, loaded in another run into models that are cut in other ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from tests.parallel import Model, parallel, two_by_two
from tests.pool import Pool
from tests.training import deliver, random_gradients

Setting = dict[str, Any]


class Narrow(nn.Module):
    """Matrices with fewer rows than ranks, and one that every layout cuts evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(5, 1)
        self.even = nn.Linear(4, 64, bias=False)


def made(kind: str, replicas: bool = False, shared: bool | None = None, **options: Any) -> tuple[Any, Any]:
    """``shared``: with fxshard's AdamW, and whether replicas share its state; None: with torch's."""
    if kind == "tensor parallel":
        mesh = two_by_two()
        plain, options["mesh"] = parallel(mesh, Model()), mesh["dp"]
    else:
        plain = Narrow()
        if replicas:
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    choice = None if shared is None else fxshard.AdamW(lr=0.1, over_replicas=shared)
    model = fxshard.shard(plain, optimizer=choice, **options)
    return model, model.optimizer if choice else torch.optim.Adam(model.parameters(), lr=0.1)


def step(kind: str, model: fxshard.ShardedModule, optimizer: torch.optim.Optimizer, number: int) -> None:
    deliver(model, random_gradients(Model() if kind == "tensor parallel" else Narrow(), number))
    optimizer.step()
    optimizer.zero_grad()


def write(kind: str, setting: Setting, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = made(kind, **setting)
    step(kind, model, optimizer, 0)
    torch.save((model.state_dict(), optimizer.state_dict()), folder / str(dist.get_rank()))
    for number in (1, 2):
        step(kind, model, optimizer, number)
    return model.full_state_dict()  # type: ignore[no-any-return]


def read(kind: str, settings: list[Setting], folder: Path) -> list[dict[str, torch.Tensor]]:
    found = []
    for setting in settings:
        model, optimizer = made(kind, **setting)
        # torch 2.11 does not know how tensor-parallel parts are cut among what weights_only=True allows.
        parameters, state = torch.load(folder / str(dist.get_rank()), weights_only=False)
        model.load_state_dict(parameters)
        optimizer.load_state_dict(state)
        for number in (1, 2):
            step(kind, model, optimizer, number)
        found.append(model.full_state_dict())
    return found


def check(ranks: Pool, kind: str, setting: Setting, settings: list[Setting], folder: Path) -> None:
    expected = ranks(4, write, kind, setting, folder)[0]
    for of_rank in ranks(4, read, kind, settings, folder):
        for found, other in zip(of_rank, settings, strict=True):
            where = f"{setting} into {other}: "
            torch.testing.assert_close(
                found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, where=where: where + text
            )


def test_with_and_without_replicas(ranks: Pool, tmp_path: Path) -> None:
    """The process groups of the mesh that was saved are not there any more, or are others."""
    hsdp: list[Setting] = [{"replicas": True, "layout": layout} for layout in ("rows", "whole")]
    check(ranks, "narrow", hsdp[0], [{"layout": "whole"}, {"zero": 0}, *hsdp], tmp_path)


def test_state_that_replicas_shared(ranks: Pool, tmp_path: Path) -> None:
    shared: Setting = {"replicas": True, "shared": True}
    others: list[Setting] = [{"shared": False}, {"replicas": True, "shared": False}, {**shared, "layout": "whole"}]
    check(ranks, "narrow", {**shared, "layout": "rows"}, others, tmp_path)


def test_tensor_parallel_parts(ranks: Pool, tmp_path: Path) -> None:
    settings: list[Setting] = [{"layout": "rows"}, {"layout": "whole"}, {"zero": 0}]
    check(ranks, "tensor parallel", settings[1], settings, tmp_path)
