"""Checkpoints of tools that write to one name again and again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fxshard
from fxshard import ShardedModule
from fxshard.frontend.pretrained import has_adapter


def save_over(
    model: ShardedModule,
    folder: Path,
    optimizer: torch.optim.Optimizer | None,
    extra: Any = None,
    *,
    first: bool,
    barrier: Callable[[], object],
) -> None:
    """``fxshard.save`` in place of what is there already, which goes when the new one is complete. Collective.

    Of a peft model only what trains, as peft saves it. ``first``: whether this is the rank that renames.
    """
    before = folder.with_name(f"{folder.name}.before")
    if first and folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    barrier()
    fxshard.save(model, folder, optimizer=optimizer, extra=extra, frozen=not has_adapter(model._inner))
    if first:
        shutil.rmtree(before, ignore_errors=True)
