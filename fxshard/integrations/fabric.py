"""Lightning Fabric: a strategy that shards and compiles with fxshard.

from lightning_fabric import Fabric
from fxshard.integrations.fabric import FxshardStrategy

fabric = Fabric(strategy=FxshardStrategy(zero=3), devices=8)
model, optimizer = fabric.setup(model, optimizer)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.strategies import DDPStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

import fxshard
from fxshard import ConfigError, ShardedModule
from fxshard.integrations.optimizers import are_all, carry_over, check_unused, names_of, trains
from fxshard.integrations.replacing import save_over


class _NoSync(_BackwardSyncControl):
    """``fabric.no_backward_sync``: micro-batches that reduce nothing."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled and isinstance(module, ShardedModule) else nullcontext()


class FxshardStrategy(DDPStrategy):
    """Processes as DDP starts them, models as ``fxshard.compile`` makes them.

    ``options``: those of ``fxshard.compile``. Optimizers that were made for the plain model go on working:
    ``fabric.setup(model, optimizer)`` carries them over to the shards. ``fabric.save`` and ``fabric.load`` take a state
    with one model, at most one optimizer, and whatever else; loading works on another number of ranks.
    """

    def __init__(self, *, process_group_backend: str | None = None, **options: Any) -> None:
        super().__init__(process_group_backend=process_group_backend)
        self._options = options
        self._backward_sync_control = _NoSync()  # type: ignore[assignment]

    # -- preparing ---------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        if isinstance(module, ShardedModule) or not trains(module):
            return module
        if self.precision.precision != "32-true":
            raise ConfigError(
                f"Fabric(precision={self.precision.precision!r}): fxshard casts parameters itself, without autocast; "
                "leave it out and give the strategy precision=fxshard.Precision(param=torch.bfloat16)"
            )
        return fxshard.compile(module, **self._options)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        names = names_of(module)
        for optimizer in optimizers:
            check_unused(optimizer, names)
        sharded = self.setup_module(module)
        if isinstance(sharded, ShardedModule):
            for optimizer in optimizers:
                carry_over(optimizer, names, sharded)
        return sharded, optimizers, scheduler

    # -- training ----------------------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip what the optimizer updates by its norm over all ranks' shards."""
        if not isinstance(module, ShardedModule) or not are_all(self.precision.main_params(optimizer), module):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        norm = module.clip_grad_norm_(float(max_norm), float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of all gradients is {float(norm)}, and they were not clipped by it")
        return norm

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """``fxshard.save`` of the model and its optimizer, and everything else next to them, in place of what an
        earlier call left there. Collective.
        """
        if storage_options is not None or filter is not None:
            raise ConfigError("fxshard saves whole states to folders: leave storage_options and filter out")
        model, optimizer, others = _parts(state)
        extra = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in others.items()}
        folder = Path(self.broadcast(path))
        save_over(model, folder, optimizer, extra, first=self.is_global_zero, barrier=self.barrier)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None
    ) -> dict[str, Any]:
        """Load what ``save_checkpoint`` wrote into the objects of ``state``; returns what it has no place for."""
        if isinstance(state, ShardedModule):
            fxshard.load(state, Path(self.broadcast(path)), weights_only=True)
            return {}
        model, optimizer, others = _parts(state or {})
        extra = dict(fxshard.load(model, Path(self.broadcast(path)), optimizer=optimizer).extra or {})
        missing = sorted(others.keys() - extra.keys())
        if missing and strict:
            raise fxshard.CheckpointError(
                f"{path} has no {', '.join(missing)}; with strict=False they stay as they are"
            )
        for key in others.keys() & extra.keys():
            value = extra.pop(key)
            if hasattr(others[key], "load_state_dict"):
                others[key].load_state_dict(value)
            else:
                state[key] = value
        return extra


def _parts(state: Mapping[str, Any]) -> tuple[ShardedModule, torch.optim.Optimizer | None, dict[str, Any]]:
    """The model of a state, its optimizer, and the rest."""
    models = [value for value in state.values() if isinstance(value, ShardedModule)]
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) > 1:
        raise ConfigError(
            f"a checkpoint has one sharded model and at most one optimizer, and this state has {len(models)} and "
            f"{len(optimizers)}: save others apart"
        )
    parts = {id(part) for part in (*models, *optimizers)}
    others = {key: value for key, value in state.items() if id(value) not in parts}
    return models[0], optimizers[0] if optimizers else None, others
