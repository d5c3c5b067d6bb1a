"""State that optimizers of ``torch.optim`` made for sharded parameters: told which rows it is before it is saved.

Such an optimizer makes its state with ``zeros_like``: DTensors with a parameter's rows, but without their answer to
``torch.distributed.checkpoint`` (``rows``), which would then record other rows. ``optimizer.state_dict()`` adds it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxshard._torch import private
from fxshard.runtime.rows import Rows
from fxshard.runtime.unreduced import bucket_of, buckets_of

_known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_hook: Any = None


def watch_optimizers() -> None:
    """From now on optimizers that step over sharded parameters are known, and asked about their state."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _known:
        _known.add(optimizer)
        if buckets_of(optimizer):
            optimizer.register_state_dict_pre_hook(_before_state_dict)


def _before_state_dict(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        bucket = bucket_of(parameter)
        if bucket is None or not isinstance(state, dict):  # what makes its tensors when asked makes them right
            continue
        for value in state.values():
            if isinstance(value, DTensor) and value.shape == parameter.shape:
                local = private.wrapped(value)
                if not isinstance(local, Rows):
                    name = bucket.name_of(parameter)
                    private.rewrap(value, bucket.rows(local.detach(), name))
