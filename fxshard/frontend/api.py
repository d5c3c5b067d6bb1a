"""The entry points: ``fxshard.compile`` and ``fxshard.shard``."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch.errors import ConfigError, StateError
from fxshard.frontend.backend import backend_of
from fxshard.frontend.capture import capture, drop_input_gradient_hooks, make_traceable
from fxshard.frontend.groups import Groups
from fxshard.frontend.materialise import Init
from fxshard.frontend.module import ShardedModule
from fxshard.frontend.sharding import take_apart
from fxshard.frontend.tensor_parallel import refuse_breaks
from fxshard.optim.adamw import ShardedAdamW
from fxshard.optim.config import AdamW, Muon, state_choice
from fxshard.optim.groups import check_patterns
from fxshard.optim.muon_rule import found_fused, matrices
from fxshard.passes.options import Debug, Options
from fxshard.passes.pass_list import PassList
from fxshard.planner.choice import LayoutKind
from fxshard.planner.domain import Reduction
from fxshard.planner.hardware import Hardware
from fxshard.planner.precision import Precision
from fxshard.planner.units import UnitPatterns


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
    memory_budget: int | str | None = None,
    activations: str = "auto",
    hardware: str | Hardware | None = None,
    experts: str = "auto",
    return_logits: bool = True,
    init: Init | None = None,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    passes: PassList | None = None,
    lowering: str = "inductor",
    cuda_graphs: bool = False,
    debug: Debug = Debug(),  # noqa: B008
) -> ShardedModule:
    """Shard a model over the data-parallel ranks and compile its training step.

    Takes any ``nn.Module`` and keeps the ordinary loop. Without a process group it runs alone; under ``torchrun`` it
    shards over all ranks, or over ``mesh``; of a mesh with two dimensions the first replicates and the second shards.
    Parameters may be DTensors on a tensor-parallel dimension of the same mesh: ``mesh=mesh["dp"]``.

    >>> model = fxshard.compile(Transformer(config), zero=3, optimizer=fxshard.AdamW(lr=3e-4))
    >>> loss = model(x, y)
    >>> loss.backward()
    >>> model.optimizer.step()
    >>> model.optimizer.zero_grad()
    >>> print(model.schedule)

    What is sharded, and how:

    - ``zero``: 0 replicates everything, 1 shards optimizer state, 2 gradients too, 3 parameters too.
    - ``optimizer``: ``fxshard.AdamW``, ``Muon`` or ``NorMuon``; without it, one of ``torch.optim`` over
      ``model.parameters()``.
    - ``precision``: ``fxshard.Precision``, ``Float8`` or ``MXFP8``; without it, the model's own.
    - ``units``: patterns of module names that are gathered together; by default the blocks of repeated lists.
    - ``layout``: ``"rows"`` cuts parameters between rows, ``"whole"`` gives each parameter to one rank, ``"auto"``
      decides for each bucket.
    - ``groups``: patterns of parameter names whose replicas are on a mesh of their own,
      ``{"*.experts.*": mesh["ep_dp"]}`` (or :class:`fxshard.Group`).
    - ``reduction``: gradients are averaged over ranks (``"mean"``), or added up (``"sum"``).
    - ``init``: for a model on the meta device, called with every module that owns parameters or buffers, in place of
      its ``reset_parameters``.

    Memory and time:

    - ``memory_budget``: bytes, or ``"60GiB"``, for all that a step holds.
    - ``activations``: what is done with saved values for which the budget has no room: ``"recompute"`` computes them
      again in backward, ``"offload"`` copies them to the host and back, ``"auto"`` does what is faster.
    - ``hardware``: the machine whose durations the schedule is made for; by default the one it runs on.
    - ``experts``: what runs mixture-of-experts MLPs: of the implementations that run on the machine, ``"auto"`` takes
      the one measured to take least, ``"torch"``, ``"triton"``, ``"te"`` or ``"te-mxfp8"`` that one, ``"off"`` leaves
      them as they are written.
    - ``return_logits``: off, a model that returns logits next to the loss computed from them, as those of
      ``transformers`` do with ``labels``, returns None for them, and they are never made (docs/design/loss.md).
    - ``cuda_graphs``: from their second run on, forward and backward are captured in CUDA graphs and replayed; their
      memory stays reserved between steps.

    How it is compiled:

    - ``lowering``: ``"inductor"``, or ``"eager"`` to run operator by operator.
    - ``fullgraph`` is ``torch.compile``'s.
    - ``dynamic``: whether a graph takes inputs of all sizes, as ``torch.compile`` has it: None leaves a size open when
      it has changed, True leaves the sizes of all inputs open at once, False compiles for each. With None those of a
      ``transformers`` model are open at once if rows of its first batch are padded.
    - ``passes``: a list derived from ``fxshard.PASSES``.
    - ``debug``: switches of :class:`fxshard.Debug`, which change no result by more than rounding.
    """
    if cuda_graphs and not fullgraph:
        raise ConfigError(
            "cuda_graphs=True needs the whole model in one graph: mend the breaks and leave fullgraph=True, or compile "
            "without cuda_graphs"
        )
    if not return_logits and not fullgraph:
        raise ConfigError(
            "return_logits=False needs the whole model in one graph: code between graphs might read the logits; mend "
            "the breaks and leave fullgraph=True, or leave out return_logits"
        )
    if optimizer is not None and optimizer.qk_clip is not None and not fullgraph:
        raise ConfigError(
            "qk_clip needs the whole model in one graph, where its attention is found: mend the breaks and leave "
            "fullgraph=True, or leave out qk_clip"
        )
    if not fullgraph and isinstance(model, nn.Module):
        refuse_breaks(model)
    given: dict[str, Any] = {name: value for name, value in locals().items() if name not in ("fullgraph", "dynamic")}
    sharded = shard(**given)
    # With open sizes nothing is captured in CUDA graphs, and less fits a budget: there only a second length opens them.
    calls = sharded._calls if memory_budget is None and not cuda_graphs else None
    again = partial(capture, sharded._inner, sharded._backend, fullgraph=fullgraph, dynamic=dynamic, calls=calls)
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
    memory_budget: int | str | None = None,
    activations: str = "auto",
    hardware: str | Hardware | None = None,
    experts: str = "auto",
    return_logits: bool = True,
    init: Init | None = None,
    passes: PassList | None = None,
    lowering: str = "inductor",
    cuda_graphs: bool = False,
    debug: Debug = Debug(),  # noqa: B008
) -> ShardedModule:
    """Shard a model without compiling it: ``torch.compile(fxshard.shard(model), backend="fxshard")`` does that.

    Arguments are those of :func:`fxshard.compile`.

    >>> sharded = fxshard.shard(model, zero=3, optimizer=fxshard.AdamW(lr=3e-4))
    >>> step = torch.compile(sharded, backend="fxshard")
    >>> step(x, y).backward()
    >>> sharded.optimizer.step()
    """
    given = dict(locals())
    if isinstance(model, ShardedModule):
        raise StateError("this model is compiled or sharded already; compile the plain module, once")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected an nn.Module, got {type(model).__name__}")
    _refuse_wrapped(model)
    if optimizer is not None and not isinstance(optimizer, AdamW | Muon):
        raise ConfigError(
            f"optimizer={optimizer!r}: expected fxshard.AdamW(...) or fxshard.Muon(...); a torch.optim optimizer is "
            "made from model.parameters() after compile"
        )
    splits = matrices(optimizer, model) if isinstance(optimizer, Muon) else {}
    fused = found_fused(optimizer, model) if isinstance(optimizer, Muon) else {}
    order = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if optimizer is not None:
        check_patterns(optimizer, order, splits)
    sharding = take_apart(
        model,
        {option.name: given[option.name] for option in fields(Options)},
        mesh=mesh,
        groups=groups,
        matrices=splits,
        own_optimizer=optimizer is not None,
        measures_logits=optimizer is not None and optimizer.qk_clip is not None,
        state=state_choice(optimizer),
        init=init,
    )
    drop_input_gradient_hooks(model)
    make_traceable(model)
    sharded = ShardedModule(model, sharding, backend_of(sharding))
    decided = sharding.state.made
    if isinstance(optimizer, AdamW):
        sharding.state.optimizer = ShardedAdamW(sharding.engine, optimizer, order, decided)
    elif isinstance(optimizer, Muon):
        from fxshard.optim.muon import ShardedMuon  # with kernels, which take a while to import

        sharding.state.optimizer = ShardedMuon(sharding.engine, optimizer, splits, order, fused, decided)
    sharded._optimizer = sharding.state.optimizer
    return sharded


WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise if torch's data parallelism has the model, or a part of it, already."""
    for name, module in model.named_modules():
        found = next((base.__name__ for base in type(module).__mro__ if base.__name__ in WRAPPERS), None)
        if found is not None:
            raise ConfigError(
                f"{name or 'the model'} is a {found}: fxshard takes its place, so leave out DistributedDataParallel, "
                "FSDP and fully_shard, and give the plain model"
            )
