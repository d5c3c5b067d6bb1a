"""A model with one of everything that a checkpoint has to move, and ways to train it without compiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

import fxshard
from tests.training import deliver

ADAMW = fxshard.AdamW(lr=1e-2, weight_decay=0.1, decay=lambda name, shape: len(shape) > 1)
MUON = fxshard.Muon(lr=2e-2, momentum=0.9, adamw=ADAMW)


class Zoo(nn.Module):
    """Uneven and tied matrices, a scalar, a frozen layer, buffers, an empty parameter, one row for many ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(37, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.odd = nn.Linear(29, 19)
        self.row = nn.Parameter(torch.randn(1, 40))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(3, 0))
        self.frozen = nn.Linear(12, 23)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.emb.weight


def zoo(seed: int = 0) -> Zoo:
    torch.manual_seed(seed)
    return Zoo()


def gradients(step: int, model: nn.Module | None = None) -> dict[str, Tensor]:
    """The whole gradients of a step: the same for any number of ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    named = (model or zoo()).named_parameters()
    return {name: torch.randn(p.shape, generator=generator) for name, p in named if p.requires_grad}


def train(
    model: fxshard.ShardedModule, steps: range, optimizer: torch.optim.Optimizer | None = None, plain: Any = None
) -> dict[str, Tensor]:
    """Make steps with given gradients; returns the whole parameters after them."""
    optimizer = optimizer or model.optimizer
    for step in steps:
        deliver(model, gradients(step, plain))
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


def plain_contents(path: Path) -> dict[str, Tensor]:
    """Every tensor of model and optimizer, read by torch's own planner and reader into whole tensors."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        key: torch.full(value.size, 77, dtype=value.properties.dtype)
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The keys in which two dictionaries differ, bit by bit."""
    return sorted((a.keys() ^ b.keys()) | {key for key in a.keys() & b.keys() if not torch.equal(a[key], b[key])})
