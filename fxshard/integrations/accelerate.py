"""Accelerate: an ``Accelerator`` whose ``prepare`` shards and compiles models with fxshard.

from fxshard.integrations.accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16", options={"zero": 3})
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import nn

import fxshard
from fxshard import ConfigError, Precision, ShardedModule, StateError
from fxshard.integrations.optimizers import are_all, carry_over, check_unused, names_of, owns, trains
from fxshard.integrations.replacing import save_over

FOLDER = "fxshard"
"""Where ``save_state`` puts a sharded model with its optimizer, inside the folder it is given; numbered from 0."""


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` with fxshard in place of DDP or FSDP.

    ``options``: what ``fxshard.compile`` is given (``zero``, ``mesh``, ``units``, ``precision``, ``memory_budget``, …).
    ``mixed_precision="bf16"`` computes in bf16 with masters and reductions in fp32, as FSDP2 does, without autocast.
    Optimizers and schedulers that were made for the plain model go on working: ``prepare`` carries their parameters
    over to the shards. ``save_state`` and ``load_state`` are collective, and work on another number of ranks.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = dict(options or {})
        if self.distributed_type not in _TYPES:
            raise ConfigError(
                f"fxshard shards models itself, and was asked to do so inside {self.distributed_type.value}: "
                "leave fsdp_plugin, deepspeed_plugin and their environment variables out"
            )
        if self.mixed_precision not in ("no", "bf16"):
            raise ConfigError(
                f"mixed_precision={self.mixed_precision!r}: fxshard computes in bf16 (mixed_precision='bf16'), "
                "or in MXFP8 (options={'precision': fxshard.MXFP8()})"
            )

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard the models that train, carry optimizers over, and prepare the rest as Accelerate does."""
        given = list(args)
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        for i, model in enumerate(args):
            if isinstance(model, ShardedModule):  # from fxshard.compile, or prepared before: so are its optimizers
                self._sharded(model)
            elif isinstance(model, nn.Module) and trains(model) and model not in self._models:
                names = names_of(model)
                for optimizer in (*optimizers, *self._optimizers):
                    check_unused(optimizer, names)
                given[i] = sharded = self._sharded(model)
                for optimizer in (*optimizers, *self._optimizers):
                    carry_over(optimizer, names, sharded)
        for model in self._sharded_models():  # of an earlier call, which did not see these optimizers
            names = names_of(model._inner)
            for optimizer in optimizers:
                check_unused(optimizer, names)
                carry_over(optimizer, names, model)
        return super().prepare(*given, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model that trains; one that is only evaluated is prepared as Accelerate does."""
        if not evaluation_mode and trains(model) and model not in self._models:
            model = self._sharded(model)
        return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]

    def _sharded(self, model: nn.Module) -> ShardedModule:
        if not isinstance(model, ShardedModule):
            model = self.unwrap_model(model, keep_fp32_wrapper=False)  # as it was before an evaluation prepared it
            options = dict(self._options)
            if self.mixed_precision == "bf16":
                options.setdefault("precision", Precision(param=torch.bfloat16, reduce=torch.float32))
            model = fxshard.compile(model.to(self.device) if self.device_placement else model, **options)
        model._is_accelerate_prepared = True  # type: ignore[assignment]  # Accelerate then leaves it as it is
        return model

    def shard_frozen(self, model: nn.Module) -> ShardedModule:
        """Shard a model that is only read, such as the reference of a preference loss, and has no optimizer."""
        return self._sharded(model.requires_grad_(False).eval())

    # -- training ----------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Clip by the norm over all ranks' shards."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for model in self._sharded_models():
            if are_all(parameters, model):
                if not self.sync_gradients and self.num_processes > 1:
                    raise StateError(
                        "clip_grad_norm_() between the micro-batches of a step, whose gradients are not added up over "
                        "ranks yet: call it below `if accelerator.sync_gradients:`"
                    )
                return model.clip_grad_norm_(float(max_norm), float(norm_type))
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    # -- saving ------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Whole parameters, on every rank. Collective."""
        if isinstance(model, ShardedModule):
            return model.full_state_dict()
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save everything that was prepared; what is sharded, by every rank its part. Collective."""
        with self._sharded_apart():
            written = super().save_state(output_dir, safe_serialization, **kwargs)
        for i, (model, optimizer) in enumerate(self._pairs()):
            self.save_sharded(model, Path(written, f"{FOLDER}_{i}"), optimizer)
        return written

    def save_sharded(self, model: ShardedModule, folder: Path, optimizer: torch.optim.Optimizer | None) -> None:
        """``fxshard.save`` in place of what an earlier run left there. Of a peft model only what trains."""
        save_over(model, folder, optimizer, first=self.is_main_process, barrier=self.wait_for_everyone)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load what ``save_state`` wrote, also on another number of ranks. Collective."""
        with self._sharded_apart():
            super().load_state(input_dir, load_kwargs, **kwargs)
        folder = Path(input_dir).expanduser() if input_dir is not None else self._newest_state()
        for i, (model, optimizer) in enumerate(self._pairs()):
            fxshard.load(model, folder / f"{FOLDER}_{i}", optimizer=optimizer)

    def _newest_state(self) -> Path:
        """The last of the folders that Accelerate named itself."""
        folders = Path(self.project_dir, "checkpoints").iterdir()
        return max(folders, key=lambda folder: int(folder.name.rsplit("_", 1)[-1]))

    @contextlib.contextmanager
    def _sharded_apart(self) -> Iterator[None]:
        """Accelerate saves and loads in here, and does not see what is sharded: it writes from one rank alone."""
        models, optimizers = self._models, self._optimizers
        sharded = {id(p): p for model in self._sharded_models() for p in model.parameters()}
        self._models = [model for model in models if not isinstance(model, ShardedModule)]
        self._optimizers = [optimizer for optimizer in optimizers if not owns(optimizer, sharded)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def _sharded_models(self) -> list[ShardedModule]:
        return [model for model in self._models if isinstance(model, ShardedModule)]

    def _pairs(self) -> Iterable[tuple[ShardedModule, torch.optim.Optimizer | None]]:
        """The sharded models, each with the optimizer that was prepared for it."""
        for model in self._sharded_models():
            own = {id(parameter): parameter for parameter in model.parameters()}
            found = [wrapped.optimizer for wrapped in self._optimizers if owns(wrapped, own)]
            if len(found) > 1:
                raise ConfigError(
                    f"{len(found)} optimizers were prepared for one model: a checkpoint of a sharded model has one; "
                    "give one optimizer several parameter groups"
                )
            yield model, found[0] if found else None


_TYPES = tuple(kind for kind in accelerate.DistributedType if kind.value in ("NO", "MULTI_CPU", "MULTI_GPU"))
