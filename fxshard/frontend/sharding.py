"""A model whose parameters have been taken apart: what planning decided and what this rank holds."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fxshard._torch import private
from fxshard._torch.errors import ConfigError, FxshardError, StateError
from fxshard._torch.log import LOG
from fxshard.frontend.cpu_products import warn_of_slow_products
from fxshard.frontend.filling import fill
from fxshard.frontend.groups import Groups, check_patterns, domain_by_name, meshes_of
from fxshard.frontend.lowering.segments import SegmentCompiler
from fxshard.frontend.materialise import Init, check_initialisable
from fxshard.frontend.state_decision import StateDecision
from fxshard.frontend.tensor_parallel import cut_matrices, find_tensor_parallel, refuse_combinations
from fxshard.kernels.costs import GPUS, short_name
from fxshard.passes.options import Options
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.buckets import plan_buckets
from fxshard.planner.domain import Domain, DomainOf, Reduction, data_parallel
from fxshard.planner.float8_policy import check_products
from fxshard.planner.hardware import Hardware, hardware
from fxshard.planner.precision import Precision
from fxshard.planner.state import StateChoice
from fxshard.planner.units import find_units
from fxshard.runtime.agreement import PARAMETERS, Agreement
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.channels import Channels, connect, connect_tensor_parallel, domain_ranks, shape_of
from fxshard.runtime.engine import Engine
from fxshard.runtime.replay import check_capturable
from fxshard.schedule.params import ParamRef
from fxshard.schedule.profile import Profile

_SHARDED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Hollow parameter → (its sharding, its place). This is how the backend recognises a parameter among graph inputs."""


_LEAVES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Hollow DTensor → a plain hollow parameter, shaped like its local part: what graphs take in its place."""


@dataclass(eq=False)
class Sharding:
    """Everything that belongs to one sharded model on this rank."""

    plans: tuple[BucketPlan, ...]
    buckets: list[Bucket]
    engine: Engine
    agreement: Agreement
    compiler: SegmentCompiler
    options: Options
    mesh: DeviceMesh | None = None
    group_name: str = "none"
    hollow: dict[str, nn.Parameter] = field(default_factory=dict)

    channels: Channels = field(default_factory=lambda: Channels(Domain()))
    """The process groups of the model's own ranks."""
    domain_of: DomainOf = field(default=domain_by_name((), Domain()))
    """Over which ranks a parameter or a buffer is data-parallel, by its name."""
    ranks: int = 1
    own_optimizer: bool = False
    """Whether one of fxshard's optimizers updates the model, which is known before the first program is scheduled."""
    measures_logits: bool = False
    """Whether that optimizer clips the logits of attention."""
    hardware: Hardware | None = None
    state: StateDecision = field(default_factory=StateDecision)
    """How optimizer state is kept."""
    profile: Profile | None = None
    """Recorded durations that replace estimates."""
    backend: object | None = None
    """The one backend that compiles this model, however ``torch.compile`` is reached."""

    @property
    def precision(self) -> Precision | None:
        return self.options.precision

    @property
    def zero(self) -> int:
        return self.options.zero

    def plan(self, *, one_graph: bool) -> ShardingPlan:
        """What scheduling a graph of this model depends on."""
        return ShardingPlan(
            self.state.buckets,
            self.options,
            self.group_name,
            self.ranks,
            self.hardware,
            self.profile,
            self.own_optimizer,
            one_graph,
            self.measures_logits,
            state=self.state.choice,
        )

    def hollow_places(self) -> dict[tuple[int, int], nn.Parameter]:
        """The hollow parameters by (bucket, position)."""
        return {(plan.index, i): self.hollow[name] for plan in self.plans for i, name in enumerate(plan.params)}


def sharding_of(value: object) -> tuple[Sharding, ParamRef] | None:
    """The sharding that a graph input belongs to, if it is a sharded parameter."""
    sharding, ref = _SHARDED.get(value, (None, None)) if isinstance(value, torch.Tensor) else (None, None)
    alive = sharding() if sharding is not None else None
    return (alive, ref) if alive is not None and ref is not None else None


def register(hollow: nn.Parameter, sharding: Sharding, ref: ParamRef) -> None:
    """From now on a graph input that is ``hollow`` stands for this place in this sharding, as long as that lives."""
    _SHARDED[hollow] = (weakref.ref(sharding), ref)
    if isinstance(hollow, DTensor):
        leaf = nn.Parameter(private.wrapped(hollow), hollow.requires_grad)
        _LEAVES[hollow] = leaf
        _SHARDED[leaf] = _SHARDED[hollow]


def plain_leaf(value: DTensor) -> torch.Tensor:
    """What a graph takes in the place of a DTensor: of a sharded parameter, the same plain one each time."""
    leaf = _LEAVES.get(value)
    return leaf if leaf is not None else value.to_local()


def unsharded(options: Options, device: torch.device) -> Sharding:
    """The sharding of a model that is not sharded: nothing to gather, everything still lowered the same way."""
    check_capturable(options, device)
    options = replace(options, zero=0, precision=None)
    return Sharding((), [], Engine([], device, options), Agreement(None), SegmentCompiler(options.lowering), options)


def take_apart(
    model: nn.Module,
    choices: Mapping[str, Any],
    *,
    mesh: DeviceMesh | None,
    groups: Groups | None,
    matrices: Collection[str],
    own_optimizer: bool,
    measures_logits: bool,
    state: StateChoice,
    init: Init | None,
) -> Sharding:
    """Shard ``model`` in place: its parameters become hollow, this rank's part of them goes into buckets.

    ``choices`` become :class:`Options` here, so that all ranks are told what is wrong with those of one.
    """
    given_mesh, mesh = mesh, _resolve_mesh(model, mesh)
    tensor = find_tensor_parallel(model, given_mesh)
    agreement = Agreement(domain_ranks(mesh if tensor is None else tensor.mesh))
    try:
        options = Options(**choices)
        if tensor is not None:
            refuse_combinations(tensor, options.precision)
        device = _check(model, mesh=mesh)
        check_capturable(options, device)
        check_products(options.precision, device)
        check_initialisable(model, init)
        domain = _domain(mesh, options.reduction)
        others = meshes_of(groups, mesh, domain)
        domain_of = domain_by_name([other for other, _ in others.values()], domain)
        estimated_for = machine(options, device)
        plans = plan_model(model, [domain, *(other for other, _ in others.values())], options, matrices, state)
    except FxshardError as error:
        agreement.fail(error)
    agreement.check(PARAMETERS, [*(_line(plan) for plan in plans), *(tensor.lines() if tensor is not None else ())])
    warn_of_slow_products({plan.param_dtype for plan in plans}, device)

    tensor = connect_tensor_parallel(tensor)
    channels = {
        chosen: connect(chosen, where, [plan for plan in plans if plan.domain == chosen], tensor)
        for chosen, where in [(domain, mesh), *others.values()]
    }
    buckets, hollow = fill(model, plans, channels, device, init)
    for name, buffer in model.named_buffers():
        value = private.local_part(buffer)
        channels[domain_of(name)].broadcast(value)
        if tensor is not None:
            tensor.broadcast(value)
    sharding = Sharding(
        plans,
        buckets,
        Engine(buckets, device, options, agreement),
        agreement,
        SegmentCompiler(options.lowering),
        options,
        mesh,
        group_name=domain.group(domain.ranks) if domain.device else "none",
        hollow=hollow,
        channels=channels[domain],
        domain_of=domain_of,
        ranks=domain.ranks,
        own_optimizer=own_optimizer,
        measures_logits=measures_logits,
        hardware=estimated_for,
        state=StateDecision.of(state, plans, options.budget),
    )
    for (bucket, position), parameter in sharding.hollow_places().items():
        register(parameter, sharding, ParamRef(bucket, position))
    return sharding


def plan_model(
    model: nn.Module,
    domains: Sequence[Domain],
    options: Options,
    matrices: Collection[str] = (),
    state: StateChoice = StateChoice(),  # noqa: B008
) -> tuple[BucketPlan, ...]:
    """The buckets of a model. ``domains``: its own ranks, then those of parameters that live on others.

    ``matrices``: the parameters that Muon updates. ``state``: how its state is kept.
    """
    own, *others = domains
    if state.over_replicas and (own.replicas == 1 or own.shards == 1 or not options.zero):
        raise ConfigError(
            "over_replicas=True is for HSDP: give a mesh of two dimensions (replicas, shards) and zero=1, 2 or "
            "3, or leave it out"
        )
    domain_of = domain_by_name(others, own)
    check_patterns(others, [name for name, _ in model.named_parameters()], domain_of)
    refuse_complex(model)
    refuse_sparse(model, several=own.ranks > 1)
    cuts = cut_matrices(model, matrices)
    if cuts is not None and state.row_moments:
        raise ConfigError(
            f"NorMuon: {cuts.wholes[0].name} is cut over tensor-parallel ranks, and second moments of rows are kept "
            "for whole rows: use fxshard.Muon there, or leave such parameters to AdamW with use="
        )
    return plan_buckets(
        model,
        find_units(model, options.units),
        zero=options.zero,
        ranks=own.shards,
        precision=options.precision,
        layout=options.layout,
        domain_of=domain_of,
        matrices=matrices,
        state=state.first,
        cuts=cuts,
    )


def refuse_complex(model: nn.Module) -> None:
    """Raise for complex parameters that train: gradients are reduced, and moments kept, in floating-point numbers."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ConfigError(
                f"{name!r} is complex ({parameter.dtype}) and trains: keep torch.view_as_real of it as the parameter, "
                "and call torch.view_as_complex in forward, or freeze it"
            )


def refuse_sparse(model: nn.Module, *, several: bool) -> None:
    """Raise for tensors of the model without one memory: a parameter that is sharded, a buffer that is broadcast."""
    kept = [("parameter", model.named_parameters()), *([("buffer", model.named_buffers())] if several else [])]
    for kind, tensors in kept:
        for name, value in tensors:
            if value.layout is not torch.strided:
                raise ConfigError(
                    f"the {kind} {name!r} is sparse ({value.layout}), and has no one memory to share with other ranks: "
                    "keep its indices and values, and make the sparse tensor in forward, with fullgraph=False"
                )


def _domain(mesh: DeviceMesh | None, reduction: Reduction) -> Domain:
    """The model's own ranks: of two mesh dimensions the first replicates and the second shards."""
    if mesh is None:
        return data_parallel(1, 1, reduction, "")
    shards, replicas, stride = shape_of(mesh)
    return data_parallel(shards, replicas, reduction, mesh.device_type, stride)


def machine(options: Options, device: torch.device) -> Hardware:
    """The machine that durations are estimated for: the one asked for, or the one the model is on."""
    if options.hardware is not None:
        return hardware(options.hardware)
    if device.type != "cuda":
        return hardware("cpu")
    name = torch.cuda.get_device_name(device)
    known = short_name(name)
    if known is None:
        LOG.warning(
            "%s is none of the GPUs that fxshard has figures of (%s): durations are estimated for an H100. Results are "
            "right, schedules may be slower than they could be; hardware= takes a name or a Hardware with your figures",
            name,
            ", ".join(GPUS),
        )
    return hardware(known or "h100")


def _resolve_mesh(model: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh | None:
    if mesh is not None:
        return mesh
    first = next(model.parameters(), None)
    kind = "cuda" if first is not None and first.device.type == "cuda" else "cpu"
    if first is not None and first.is_meta:
        kind = _default_kind()
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return None
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("shard",))


def _default_kind() -> str:
    """Where a model on the meta device is made real if no mesh says it."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check(model: nn.Module, *, mesh: DeviceMesh | None) -> torch.device:
    """Refuse what cannot work, before anything is changed. Returns the device of the model."""
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    for name, parameter in parameters.items():
        if sharding_of(parameter) is not None:
            raise StateError(f"{type(model).__name__} is sharded already ({name!r} is hollow); compile a model once")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            raise StateError(
                f"{name!r} has hooks, which would never run: autograd does not see gradients of sharded parameters. "
                "Register them with register_post_accumulate_grad_hook on the parameters of the model that "
                "fxshard.compile returns"
            )
        if parameter.grad is not None:
            raise StateError(f"{name!r} has a gradient in flight; call zero_grad() before sharding the model")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        where = {str(device): next(n for n, p in parameters.items() if p.device == device) for device in devices}
        raise ConfigError(f"parameters are on {len(devices)} devices ({where}); move the model to one device first")
    (device,) = devices
    if device.type == "meta":
        kind = mesh.device_type if mesh is not None else _default_kind()
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    if mesh is not None and mesh.ndim > 2:
        raise ConfigError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; pass the data-parallel part of it: one dimension "
            'that shards, or two, of which the first replicates (mesh["dp"], mesh["replicate", "shard"])'
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
        f"{plan.param_dtype}/{plan.master_dtype}/{plan.reduce_dtype}, {plan.placement}, {plan.domain}, "
        f"{plan.gather}, layout {slots}"
    )
