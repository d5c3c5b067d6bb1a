"""A model whose parameters have been taken apart: what planning decided and what this rank holds."""

from __future__ import annotations

import hashlib
import os
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from fxshard.config import Options, Precision
from fxshard.errors import ConfigError, FxshardError, StateError
from fxshard.lowering import SegmentCompiler
from fxshard.passes.context import ParamRef
from fxshard.plan.buckets import LAYOUTS, BucketPlan, LayoutKind, plan_buckets
from fxshard.plan.hardware import Hardware, hardware
from fxshard.plan.placement import ZERO
from fxshard.plan.units import UnitPatterns, find_units
from fxshard.precision.policy import check_precision
from fxshard.runtime.agreement import PARAMETERS, Agreement
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.engine import Engine, Groups

_SHARDED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Hollow parameter → (its sharding, its place). This is how the backend recognises a parameter among graph inputs."""


@dataclass(eq=False)
class Sharding:
    """Everything that belongs to one sharded model on this rank."""

    plans: tuple[BucketPlan, ...]
    buckets: list[Bucket]
    engine: Engine
    agreement: Agreement
    compiler: SegmentCompiler
    options: Options
    precision: Precision | None
    mesh: DeviceMesh | None
    zero: int
    group_name: str
    hollow: dict[str, nn.Parameter] = field(default_factory=dict)

    ranks: int = 1
    hardware: Hardware | None = None
    backend: object | None = None
    """The one backend that compiles this model, however ``torch.compile`` is reached."""


def sharding_of(value: object) -> tuple[Sharding, ParamRef] | None:
    """The sharding that a graph input belongs to, if it is a sharded parameter."""
    sharding, ref = _SHARDED.get(value, (None, None)) if isinstance(value, torch.Tensor) else (None, None)
    alive = sharding() if sharding is not None else None
    return (alive, ref) if alive is not None and ref is not None else None


def register(hollow: nn.Parameter, sharding: Sharding, ref: ParamRef) -> None:
    """From now on a graph input that is ``hollow`` stands for this place in this sharding, as long as that lives."""
    _SHARDED[hollow] = (weakref.ref(sharding), ref)


def unsharded(options: Options, device: torch.device) -> Sharding:
    """The sharding of a model that is not sharded: nothing to gather, everything still lowered the same way."""
    engine = Engine([], None, device, options)
    return Sharding((), [], engine, Agreement(None), SegmentCompiler(options.lowering), options, None, None, 0, "none")


def take_apart(
    model: nn.Module,
    *,
    zero: int,
    mesh: DeviceMesh | None,
    units: UnitPatterns | None,
    precision: Precision | None,
    layout: LayoutKind,
    options: Options,
) -> Sharding:
    """Shard ``model`` in place: its parameters become hollow, this rank's part of them goes into buckets."""
    mesh = _resolve_mesh(model, mesh)
    if mesh is not None and mesh.ndim != 1:
        raise ConfigError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; pass the one-dimensional data-parallel mesh"
        )
    group = mesh.get_group() if mesh is not None else None
    agreement = Agreement(group)
    ranks = mesh.size() if mesh is not None else 1
    try:
        check_precision(precision)
        device = _check(model, zero=zero, mesh=mesh, layout=layout)
        machine(options, device)
        plans = plan_buckets(
            model, find_units(model, units), zero=zero, ranks=ranks, precision=precision, layout=layout
        )
    except FxshardError as error:
        agreement.fail(error)
    agreement.check(PARAMETERS, [_line(plan) for plan in plans])

    rank = mesh.get_local_rank() if mesh is not None else 0
    originals = dict(model.named_parameters())
    buckets = []
    sharding_refs: dict[str, ParamRef] = {}
    for plan in plans:
        bucket = Bucket(plan, rank, device, mesh)
        _move_in(bucket, originals, group)
        buckets.append(bucket)
        for position, name in enumerate(plan.params):
            sharding_refs[name] = ParamRef(plan.index, position)
    if group is not None:
        for buffer in model.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
    engine = Engine(buckets, _groups(group), device, options)
    sharding = Sharding(
        plans,
        buckets,
        engine,
        agreement,
        SegmentCompiler(options.lowering),
        options,
        precision,
        mesh,
        zero,
        group_name=f"{mesh.device_type}×{ranks}" if mesh is not None else "none",
        hollow=originals,
        ranks=ranks,
        hardware=machine(options, device),
    )
    for name, ref in sharding_refs.items():
        register(originals[name], sharding, ref)
    return sharding


def machine(options: Options, device: torch.device) -> Hardware:
    """The machine that durations are estimated for: the one asked for, or the one the model is on."""
    if options.hardware is not None:
        return hardware(options.hardware)
    if device.type != "cuda":
        return hardware("cpu")
    name = torch.cuda.get_device_name(device).lower()
    return hardware(next((known for known in ("gb200", "b200", "h200", "h100", "a100") if known in name), "h100"))


def _groups(group: dist.ProcessGroup | None) -> Groups | None:
    """Gathers and reductions each in a group of their own.

    Within a group ranks must start collectives in the same order. The order of gathers and the order of reductions
    follow from the model; how the two interleave follows from durations, which differ between ranks whose batches do.
    """
    if group is None or group.size() == 1:
        return None
    members = dist.get_process_group_ranks(group)
    return Groups(group, dist.new_group(members, use_local_synchronization=True))


def _move_in(bucket: Bucket, originals: dict[str, nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Take the bucket's parameters over from the model, one at a time, freeing each behind us.

    Rank 0's values win: replicas must start equal, and ranks that were seeded differently would otherwise train a
    model that is a patchwork of theirs.
    """
    bucket.make_params(originals)
    for name in bucket.plan.params:
        parameter = originals[name]
        value = parameter.detach().contiguous()
        if group is not None:
            dist.broadcast(value, group=group, group_src=0)
        bucket.load({name: value})
        _hollow_out(parameter, bucket.plan.param_dtype)
    if bucket.full is not None and bucket.plan.layout.ranks == 1:
        with torch.no_grad():
            own = bucket.own_slice(bucket.full)
            if own.data_ptr() != bucket.master.data_ptr():
                own.copy_(bucket.master)


def _hollow_out(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Leave shape, strides and dtype of a parameter, but no memory."""
    hollow = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    hollow.untyped_storage().resize_(0)
    parameter.data = hollow


def _resolve_mesh(model: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh | None:
    if mesh is not None:
        return mesh
    first = next(model.parameters(), None)
    kind = "cuda" if first is not None and first.device.type == "cuda" else "cpu"
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return None
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("shard",))


def _check(model: nn.Module, *, zero: int, mesh: DeviceMesh | None, layout: str) -> torch.device:
    """Refuse what cannot work, before anything is changed. Returns the device of the model."""
    if zero not in ZERO or isinstance(zero, bool):
        raise ConfigError(f"zero={zero!r}: expected 0, 1, 2 or 3")
    if layout not in LAYOUTS:
        raise ConfigError(f"layout={layout!r}: expected one of {', '.join(map(repr, LAYOUTS))}")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    for name, parameter in parameters.items():
        if sharding_of(parameter) is not None:
            raise StateError(f"{type(model).__name__} is sharded already ({name!r} is hollow); compile a model once")
        if parameter.grad is not None:
            raise StateError(f"{name!r} has a gradient in flight; call zero_grad() before sharding the model")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        where = {str(device): next(n for n, p in parameters.items() if p.device == device) for device in devices}
        raise ConfigError(f"parameters are on {len(devices)} devices ({where}); move the model to one device first")
    (device,) = devices
    if device.type == "meta":
        raise ConfigError(
            "parameters are on the meta device; materialise them first (model.to_empty(device=...) and init)"
        )
    if mesh is not None and mesh.size() > dist.get_world_size():
        raise ConfigError(f"mesh has {mesh.size()} ranks but the world has {dist.get_world_size()}")
    if mesh is not None and mesh.device_type != device.type:
        raise ConfigError(f"the mesh is for {mesh.device_type!r} but the model is on {device.type!r}")
    return device


def _line(plan: BucketPlan) -> str:
    """A bucket as one line that ranks can compare."""
    slots = hashlib.sha256(str([(slot.spec, slot.offset) for slot in plan.layout.slots]).encode()).hexdigest()[:12]
    return (
        f"bucket {plan.index} {plan.name!r}: {len(plan.params)} parameters, "
        f"{plan.layout.ranks} × {plan.layout.shard_numel} elements, "
        f"{plan.param_dtype}/{plan.master_dtype}/{plan.reduce_dtype}, {plan.placement}, {plan.gather}, layout {slots}"
    )
