"""The entry points: ``fxshard.compile`` and ``fxshard.shard``."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.backend import backend_of
from fxshard.capture import capture
from fxshard.config import AdamW, Options, Precision, parse_bytes
from fxshard.errors import ConfigError, StateError
from fxshard.module import ShardedModule
from fxshard.optim.adamw import ShardedAdamW
from fxshard.plan.buckets import LayoutKind
from fxshard.plan.hardware import Hardware
from fxshard.plan.units import UnitPatterns
from fxshard.sharding import Sharding, take_apart


def compile(
    model: nn.Module,
    *,
    zero: int = 3,
    mesh: DeviceMesh | None = None,
    units: UnitPatterns | None = None,
    optimizer: AdamW | None = None,
    precision: Precision | None = None,
    layout: LayoutKind = "rows",
    lowering: str = "inductor",
    memory_budget: int | str | None = None,
    hardware: str | Hardware | None = None,
    prefetch: int | None = None,
    keep_resident: bool = True,
    overlap: bool = True,
    arena: bool = True,
    verify: bool = True,
    experts: str = "auto",
    fullgraph: bool = True,
    dynamic: bool | None = None,
) -> ShardedModule:
    """Shard a model over the data-parallel ranks and compile its training step.

    Takes any ``nn.Module`` and keeps the ordinary loop. Without a process group it runs alone; under ``torchrun`` it
    shards over all ranks, or over ``mesh``.

    >>> model = fxshard.compile(Transformer(config), zero=3, optimizer=fxshard.AdamW(lr=3e-4))
    >>> loss = model(x, y)
    >>> loss.backward()
    >>> model.optimizer.step()
    >>> model.optimizer.zero_grad()
    >>> print(model.schedule)

    ``zero``: 0 replicates everything, 1 shards optimizer state, 2 gradients too, 3 parameters too. ``units``: patterns
    of module names that are gathered together (default: the blocks of repeated lists). ``layout``: ``"rows"`` cuts
    parameters between rows, ``"whole"`` gives each parameter to one rank. ``memory_budget``: bytes, or ``"60GiB"``, for
    shards and arena on a rank. ``fullgraph`` and ``dynamic`` are ``torch.compile``'s; the other options are those of
    :class:`fxshard.config.Options`.
    """
    sharded = shard(
        model,
        zero=zero,
        mesh=mesh,
        units=units,
        optimizer=optimizer,
        precision=precision,
        layout=layout,
        lowering=lowering,
        memory_budget=memory_budget,
        hardware=hardware,
        prefetch=prefetch,
        keep_resident=keep_resident,
        overlap=overlap,
        arena=arena,
        verify=verify,
        experts=experts,
    )
    sharded.bind(capture(sharded._inner, sharded._backend, fullgraph=fullgraph, dynamic=dynamic))
    return sharded


def shard(
    model: nn.Module,
    *,
    zero: int = 3,
    mesh: DeviceMesh | None = None,
    units: UnitPatterns | None = None,
    optimizer: AdamW | None = None,
    precision: Precision | None = None,
    layout: LayoutKind = "rows",
    lowering: str = "inductor",
    memory_budget: int | str | None = None,
    hardware: str | Hardware | None = None,
    prefetch: int | None = None,
    keep_resident: bool = True,
    overlap: bool = True,
    arena: bool = True,
    verify: bool = True,
    experts: str = "auto",
) -> ShardedModule:
    """Shard a model without compiling it: ``torch.compile(fxshard.shard(model), backend="fxshard")`` does that.

    >>> sharded = fxshard.shard(model, zero=3, optimizer=fxshard.AdamW(lr=3e-4))
    >>> step = torch.compile(sharded, backend="fxshard")
    >>> step(x, y).backward()
    >>> sharded.optimizer.step()
    """
    if isinstance(model, ShardedModule):
        raise StateError("this model is compiled or sharded already; compile the plain module, once")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected an nn.Module, got {type(model).__name__}")
    options = Options(
        lowering=lowering,
        prefetch=prefetch,
        keep_resident=keep_resident,
        overlap=overlap,
        arena=arena,
        memory_budget=parse_bytes(memory_budget),
        hardware=hardware,
        verify=verify,
        experts=experts,
    )
    sharding = take_apart(model, zero=zero, mesh=mesh, units=units, precision=precision, layout=layout, options=options)
    sharded = ShardedModule(model, sharding, backend_of(sharding))
    if optimizer is not None:
        sharded._optimizer = _optimizer(optimizer, sharding)
    return sharded


def _optimizer(choice: AdamW, sharding: Sharding) -> torch.optim.Optimizer:
    if isinstance(choice, AdamW):
        return ShardedAdamW(sharding.buckets, choice)
    raise ConfigError(
        f"optimizer={choice!r}: expected fxshard.AdamW(...); a torch.optim optimizer is made from model.parameters() "
        "after compile"
    )
