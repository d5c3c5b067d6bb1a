"""The entry points: ``fxshard.compile`` and ``fxshard.shard``."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.backend import backend_of
from fxshard.brief import capture_briefly
from fxshard.capture import capture
from fxshard.config import AdamW, Muon, Options, Precision, parse_bytes
from fxshard.errors import ConfigError, StateError
from fxshard.groups import Groups
from fxshard.materialise import Init
from fxshard.module import ShardedModule
from fxshard.optim.adamw import ShardedAdamW
from fxshard.optim.muon_rule import matrices
from fxshard.passes.pass_list import PassList
from fxshard.plan.choice import LayoutKind
from fxshard.plan.domain import Reduction
from fxshard.plan.hardware import Hardware
from fxshard.plan.units import UnitPatterns
from fxshard.sharding import take_apart


def compile(
    model: nn.Module,
    *,
    zero: int = 3,
    mesh: DeviceMesh | None = None,
    units: UnitPatterns | None = None,
    optimizer: AdamW | Muon | None = None,
    precision: Precision | None = None,
    layout: LayoutKind = "auto",
    reduction: Reduction = "mean",
    groups: Groups | None = None,
    lowering: str = "inductor",
    memory_budget: int | str | None = None,
    hardware: str | Hardware | None = None,
    prefetch: int | None = None,
    keep_resident: bool = True,
    defer_wgrad: bool = True,
    overlap: bool = True,
    arena: bool = True,
    verify: bool = True,
    experts: str = "auto",
    fullgraph: bool = True,
    dynamic: bool | None = None,
    init: Init | None = None,
    passes: PassList | None = None,
    trace_once: bool = True,
    cuda_graphs: bool = False,
) -> ShardedModule:
    """Shard a model over the data-parallel ranks and compile its training step.

    Takes any ``nn.Module`` and keeps the ordinary loop. Without a process group it runs alone; under ``torchrun`` it
    shards over all ranks, or over ``mesh``; of a mesh with two dimensions the first replicates and the second shards.

    >>> model = fxshard.compile(Transformer(config), zero=3, optimizer=fxshard.AdamW(lr=3e-4))
    >>> loss = model(x, y)
    >>> loss.backward()
    >>> model.optimizer.step()
    >>> model.optimizer.zero_grad()
    >>> print(model.schedule)

    ``zero``: 0 replicates everything, 1 shards optimizer state, 2 gradients too, 3 parameters too. ``units``: patterns
    of module names that are gathered together (default: the blocks of repeated lists). ``layout``: ``"rows"`` cuts
    parameters between rows, ``"whole"`` gives each parameter to one rank, ``"auto"`` decides for each bucket.
    ``reduction``: gradients are averaged over ranks (``"mean"``), or added up (``"sum"``). ``groups``: patterns of
    parameter names whose replicas are on a mesh of their own, ``{"*.experts.*": mesh["ep_dp"]}`` (or
    :class:`fxshard.Group`). ``memory_budget``: bytes, or ``"60GiB"``, for shards and arena on a rank. ``init``: for a
    model on the meta device, called with every module that owns parameters or buffers, in place of its
    ``reset_parameters``. ``fullgraph`` and ``dynamic`` are ``torch.compile``'s; the other options are those of
    :class:`fxshard.config.Options`.
    """
    if cuda_graphs and not fullgraph:
        raise ConfigError(
            "cuda_graphs=True needs the whole model in one graph: mend the breaks and leave fullgraph=True, or compile "
            "without cuda_graphs"
        )
    given: dict[str, Any] = {name: value for name, value in locals().items() if name not in ("fullgraph", "dynamic")}
    sharded = shard(**given)
    brief = fullgraph and trace_once
    again = (
        partial(capture_briefly, sharded._inner, sharded._backend, dynamic=dynamic)
        if brief
        else partial(capture, sharded._inner, sharded._backend, fullgraph=fullgraph, dynamic=dynamic)
    )
    sharded.bind(again, fullgraph=fullgraph)
    return sharded


def shard(
    model: nn.Module,
    *,
    zero: int = 3,
    mesh: DeviceMesh | None = None,
    units: UnitPatterns | None = None,
    optimizer: AdamW | Muon | None = None,
    precision: Precision | None = None,
    layout: LayoutKind = "auto",
    reduction: Reduction = "mean",
    groups: Groups | None = None,
    lowering: str = "inductor",
    memory_budget: int | str | None = None,
    hardware: str | Hardware | None = None,
    prefetch: int | None = None,
    keep_resident: bool = True,
    defer_wgrad: bool = True,
    overlap: bool = True,
    arena: bool = True,
    verify: bool = True,
    experts: str = "auto",
    init: Init | None = None,
    passes: PassList | None = None,
    trace_once: bool = True,
    cuda_graphs: bool = False,
) -> ShardedModule:
    """Shard a model without compiling it: ``torch.compile(fxshard.shard(model), backend="fxshard")`` does that.

    Arguments are those of :func:`fxshard.compile`.

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
        defer_wgrad=defer_wgrad,
        overlap=overlap,
        arena=arena,
        memory_budget=parse_bytes(memory_budget),
        hardware=hardware,
        verify=verify,
        experts=experts,
        passes=passes,
        trace_once=trace_once,
        cuda_graphs=cuda_graphs,
    )
    if optimizer is not None and not isinstance(optimizer, AdamW | Muon):
        raise ConfigError(
            f"optimizer={optimizer!r}: expected fxshard.AdamW(...) or fxshard.Muon(...); a torch.optim optimizer is "
            "made from model.parameters() after compile"
        )
    splits = matrices(optimizer, model) if isinstance(optimizer, Muon) else {}
    sharding = take_apart(
        model,
        zero=zero,
        mesh=mesh,
        units=units,
        precision=precision,
        layout=layout,
        options=options,
        matrices=splits,
        own_optimizer=optimizer is not None,
        reduction=reduction,
        groups=groups,
        init=init,
    )
    sharded = ShardedModule(model, sharding, backend_of(sharding))
    if isinstance(optimizer, AdamW):
        sharded._optimizer = ShardedAdamW(sharding.engine, optimizer)
    elif isinstance(optimizer, Muon):
        from fxshard.optim.muon import ShardedMuon  # with kernels, which take a while to import

        sharded._optimizer = ShardedMuon(sharding.engine, optimizer, splits)
    return sharded
