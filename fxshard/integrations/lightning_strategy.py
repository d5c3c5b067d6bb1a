"""The base of the strategies for Lightning's ``Trainer``, which comes in two packages.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names, with classes of their own: each has a
strategy, in ``fxshard.integrations.lightning`` and in ``fxshard.integrations.pytorch_lightning``, which adds its bases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

import fxshard
from fxshard import CheckpointError, ConfigError, ShardedModule
from fxshard.checkpoint import folder
from fxshard.integrations.optimizers import are_all, carry_over, check_unused, names_of, trains
from fxshard.integrations.replacing import save_over

_OPTIONS_OF: WeakKeyDictionary[ShardedModule, dict[str, Any]] = WeakKeyDictionary()
"""The options that strategies compiled models with: a model may meet another Trainer, with the same options."""


class TrainerStrategy:
    """Processes as Lightning's DDP starts them; the module that trains inside the ``LightningModule``, sharded.

    ``options``: those of ``fxshard.compile``. What trains must be in one submodule of the ``LightningModule``, whose
    ``training_step`` calls it (``self.model(...)``): that submodule is compiled and takes its own place, before
    ``configure_optimizers``, whose optimizer is over shards therefore. Everything else in ``training_step`` runs as it
    is written. Checkpoints are folders that load on any number of ranks.
    """

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False
    precision_class: type[ClipsShards]

    # Members of the other base.
    accelerator: Any
    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]
    root_device: torch.device
    is_global_zero: bool
    cluster_environment: Any
    barrier: Any
    broadcast: Any
    setup_precision_plugin: Any
    _reset_optimizers_and_schedulers: Any
    _layer_sync: Any
    _checkpoint_io: Any

    def __init__(self, *, process_group_backend: str | None = None, **options: Any) -> None:
        super().__init__(process_group_backend=process_group_backend)  # type: ignore[call-arg]
        self._options = options
        self._own_precision = self.precision_class(self)
        self._places: tuple[str, ...] = ()
        self._names: dict[int, str] = {}

    @property
    def sharded(self) -> ShardedModule:
        """The compiled submodule."""
        return self.lightning_module.get_submodule(self._places[0])  # type: ignore[no-any-return]

    # -- preparing ---------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        return self._own_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is None or isinstance(plugin, ClipsShards):
            return
        if plugin.precision != "32-true" or type(plugin) not in self.precision_class.__mro__:
            raise ConfigError(
                f"Trainer(precision={plugin.precision!r}), with {type(plugin).__name__}: fxshard casts parameters "
                "itself, without autocast; leave it out and give the strategy "
                "precision=fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)"
            )

    def setup(self, trainer: Any) -> None:
        """Shard what trains, then let ``configure_optimizers`` see the shards."""
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self._refuse(module)
        self._places = trained_submodule(module)
        plain = module.get_submodule(self._places[0])
        if isinstance(plain, ShardedModule):
            self._refuse_other_options(plain)
        else:
            for child in module.children():
                if not any(parameter.is_meta for parameter in child.parameters()):
                    child.to(self.root_device)
            self._names = names_of(plain)
            compiled = fxshard.compile(plain, **self._options)
            _OPTIONS_OF[compiled] = self._options
            for place in self._places:
                setattr(module, place, compiled)
        module.to(self.root_device)  # which LightningModule.device says from now on
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _refuse(self, module: Any) -> None:
        if self._layer_sync is not None:
            raise ConfigError(
                "Trainer(sync_batchnorm=True): fxshard compiles the model as it is; leave it out, or use norms that "
                "need no other ranks"
            )
        if getattr(module, "_compiler_ctx", None) is not None:
            raise ConfigError(
                "fxshard compiles what trains: give the Trainer the LightningModule without torch.compile"
            )
        if type(self._checkpoint_io).__name__ not in ("NoneType", "TorchCheckpointIO"):
            raise ConfigError(
                f"{type(self._checkpoint_io).__name__}: every rank writes its part of a checkpoint, through no plugin; "
                "leave it out"
            )

    def _refuse_other_options(self, compiled: ShardedModule) -> None:
        if self._options and self._options != _OPTIONS_OF.get(compiled):
            raise ConfigError(
                f"self.{self._places[0]} is compiled already, and the strategy was given {', '.join(self._options)}: "
                "give them to fxshard.compile, or leave that to the strategy"
            )

    def setup_optimizers(self, trainer: Any) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)  # type: ignore[misc]
        if len(self.optimizers) > 1:
            raise ConfigError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, and a sharded model has one: give "
                "it several parameter groups"
            )
        own = self.sharded._optimizer
        for optimizer in self.optimizers:
            if own is not None and optimizer is not own:
                raise ConfigError(
                    "the strategy was given optimizer=, and configure_optimizers returned another one: return "
                    f"self.{self._places[0]}.optimizer, or leave optimizer= out"
                )
            check_unused(optimizer, self._names)
            carry_over(optimizer, self._names, self.sharded)  # if it was made in __init__
            self._leave_out_unsharded(optimizer)

    def _leave_out_unsharded(self, optimizer: torch.optim.Optimizer) -> None:
        """``self.parameters()`` has those of frozen modules, too, which no step changes and no checkpoint of it has."""
        sharded = {id(parameter) for parameter in self.sharded.parameters()}
        for group in optimizer.param_groups:
            others = [parameter for parameter in group["params"] if id(parameter) not in sharded]
            if any(parameter.requires_grad for parameter in others):
                raise ConfigError(
                    "configure_optimizers returned an optimizer over parameters that are none of the LightningModule's "
                    f"own: all that trains must be in self.{self._places[0]}"
                )
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in sharded]

    def teardown(self) -> None:
        """Lightning's own strategies move the model to the CPU; shards stay where they are."""
        self.cluster_environment.teardown()
        self.accelerator.teardown()

    # -- training ----------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Micro-batches of ``accumulate_grad_batches`` reduce nothing, but for the last."""
        with self.sharded.no_sync():
            yield

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State that is not sharded: metrics, frozen modules. The rest is written by ``save_checkpoint``, sharded."""
        sharded = tuple(f"{place}." for place in self._places)
        state = self.lightning_module.state_dict()
        return {name: value for name, value in state.items() if not name.startswith(sharded)}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing yet: ``save_checkpoint`` writes it, sharded."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A folder with what is sharded, and all that Lightning wants to keep next to it. Collective."""
        if storage_options is not None:
            raise ConfigError("fxshard saves to folders: leave storage_options out")
        optimizer = self.optimizers[0] if checkpoint.get("optimizer_states") else None
        path = Path(self.broadcast(filepath))
        save_over(self.sharded, path, optimizer, checkpoint, first=self.is_global_zero, barrier=self.barrier)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Load what ``save_checkpoint`` wrote; returns what Lightning kept."""
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is no folder: fxshard did not write it. Take the weights of another strategy's checkpoint by "
                "load_from_checkpoint() of the LightningModule, and train on without ckpt_path"
            )
        fits = self.lightning_module.trainer.state.fn == "fit"
        optimizer = self.optimizers[0] if fits and self.optimizers else None
        if optimizer is not None and folder.read(path)["optimizer"] is None:
            raise CheckpointError(
                f"{path} has weights and no optimizer: resume from one that ModelCheckpoint wrote without "
                "save_weights_only, or start from its weights, without ckpt_path: "
                f"fxshard.load(self.{self._places[0]}, path, weights_only=True) in on_fit_start"
            )
        checkpoint = fxshard.load(self.sharded, path, optimizer=optimizer, weights_only=not fits).extra
        self._load_unsharded(checkpoint["state_dict"], path)
        return checkpoint  # type: ignore[no-any-return]

    def _load_unsharded(self, state: Mapping[str, Any], path: Path) -> None:
        differs = sorted(state.keys() ^ self.lightning_module_state_dict().keys())
        if differs and self.lightning_module.strict_loading:
            raise CheckpointError(
                f"{path} has other unsharded state than the LightningModule: {', '.join(differs)}; with "
                "strict_loading = False it stays as it is"
            )
        self.lightning_module.load_state_dict(state, strict=False)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Done by ``load_checkpoint``."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done by ``load_checkpoint``."""


class ClipsShards:
    """Lightning steps and clips in its precision plugin: this one by the norm over all ranks' shards."""

    precision = "32-true"

    def __init__(self, strategy: TrainerStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Forward and backward first, then the step: an optimizer refuses gradients that no backward has reduced."""
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        updated: Iterable[nn.Parameter] = self.main_params(optimizer)  # type: ignore[attr-defined]
        if are_all(updated, self._strategy.sharded):
            self._strategy.sharded.clip_grad_norm_(float(clip_val))
        else:
            super().clip_grad_by_norm(optimizer, clip_val)  # type: ignore[misc]


def trained_submodule(module: nn.Module) -> tuple[str, ...]:
    """The names under which a ``LightningModule`` has the one submodule that trains."""
    found = {id(child): name for name, child in module.named_children() if trains(child)}
    direct = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
    if len(found) != 1 or direct:
        names = ", ".join([*found.values(), *direct]) or "nothing"
        raise ConfigError(
            f"fxshard compiles one submodule of a LightningModule, the one that trains; in {type(module).__name__} "
            f"these do: {names}. Put what trains into one module with a forward (self.model = ...), call that in "
            "training_step, and freeze the rest (requires_grad_(False))"
        )
    (chosen,) = found
    return tuple(name for name, child in module._modules.items() if id(child) == chosen)
