"""``fxshard.plan``: the schedule of a model for any number of ranks, from shapes alone; ``fxshard.explain``: what
becomes of its experts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fxshard._torch import private
from fxshard._torch.errors import ConfigError, StateError
from fxshard.frontend.absent_layers import AbsentLayers
from fxshard.frontend.capture import FAILURES, capture, cast_floats, explained
from fxshard.frontend.groups import is_count, planned_domains
from fxshard.frontend.module import ShardedModule
from fxshard.frontend.plain_graph import plain_graph
from fxshard.frontend.planned_mesh import MeshShape, Parallelize, parallelized, planned_mesh
from fxshard.frontend.sharding import plan_model, sharding_of
from fxshard.frontend.tracing import graph_inputs, outputs_without_values, partitioned_step, tie_parameters
from fxshard.frontend.transformers_calls import Calls
from fxshard.kernels.report import ExpertsReport
from fxshard.optim.config import AdamW, Muon, state_choice
from fxshard.optim.muon_rule import matrices
from fxshard.passes.budget_trades import Trade
from fxshard.passes.context import PassContext
from fxshard.passes.options import Debug, Options
from fxshard.passes.pass_list import PassList
from fxshard.passes.pipeline import before_autograd
from fxshard.passes.scheduling import schedule, trade
from fxshard.passes.sharding_plan import ShardingPlan
from fxshard.passes.stages import Partitioned
from fxshard.planner.choice import LayoutKind
from fxshard.planner.domain import Domain, Reduction, data_parallel
from fxshard.planner.hardware import Hardware
from fxshard.planner.hardware import hardware as known
from fxshard.planner.precision import Precision
from fxshard.planner.units import UnitPatterns
from fxshard.runtime.hollow import hollow_like
from fxshard.schedule.events import Phase
from fxshard.schedule.observe import Observer, observer
from fxshard.schedule.params import ParamRef
from fxshard.schedule.profile import Profile
from fxshard.schedule.schedule import Schedule

CPU = torch.device("cpu")
STAGES = ("capturing", "differentiating", "partitioning", "scheduling")
"""What planning does, in order. Each takes a good part of the time."""


def plan(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    mesh: MeshShape | None = None,
    parallelize: Parallelize | None = None,
    shard_size: int | None = None,
    hardware: str | Hardware = "h200",
    zero: int = 3,
    units: UnitPatterns | None = None,
    optimizer: AdamW | Muon | None = None,
    precision: Precision | None = None,
    layout: LayoutKind = "auto",
    reduction: Reduction = "mean",
    groups: Mapping[str, int] | Mapping[str, str] | None = None,
    memory_budget: int | str | None = None,
    activations: str = "auto",
    experts: str = "auto",
    return_logits: bool = True,
    passes: PassList | None = None,
    lowering: str = "inductor",
    debug: Debug = Debug(),  # noqa: B008
    profile: Profile | None = None,
    progress: Callable[[str], None] | None = None,
) -> Schedule:
    """The schedule that ``fxshard.compile`` would emit on ``world_size`` ranks: no process group, no GPU, no weights.

    The model and the inputs may be on the meta device. Nothing of them is changed. ``shard_size``: over how many ranks
    parameters are sharded; each shard then has ``world_size / shard_size`` replicas (HSDP). Default: over all.
    ``groups``: of parameters that match a pattern, the number of ranks that hold the same. A ``profile`` of a run
    replaces estimated durations. ``progress`` is called with the name of each of ``STAGES`` when it begins.

    In place of ``world_size``, ``mesh``: the ranks along each dimension, ``{"dp": 128, "tp": 8}``. What ``dp`` (or
    ``dp_replicate`` and ``dp_shard``; without these, the whole mesh) spans is data-parallel. ``parallelize`` is called
    with a copy of the model and a ``DeviceMesh`` of these dimensions, as a run would have it, and cuts the copy for it
    or gives another model; ``groups`` then names dimensions. Collectives of the model's own are part of the plan.

    >>> with torch.device("meta"):
    ...     model = Transformer(config)
    >>> tokens = torch.empty(1, 4096, dtype=torch.int64, device="meta")
    >>> schedule = fxshard.plan(model, (tokens, tokens), world_size=1024, hardware="h200", memory_budget="60GiB")
    >>> print(schedule, schedule.simulate("h200").step_seconds)
    """
    given = dict(locals())
    options = Options(**{option.name: given[option.name] for option in fields(Options) if option.name in given})
    ranks = _Ranks(world_size, shard_size, groups, mesh, parallelize)
    watching, report = observer(), progress or (lambda stage: None)
    partitioned, sharding = _partitioned(model, example_inputs, options, ranks, optimizer, profile, watching, report)
    report("scheduling")
    return schedule(partitioned, sharding, watching).schedule


def sweep(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    shard_size: int | None = None,
    mesh: MeshShape | None = None,
    parallelize: Parallelize | None = None,
    optimizer: AdamW | Muon | None = None,
    groups: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> tuple[Trade, ...]:
    """The simulated step time over ``memory_budget``: all budgets from which on a step is faster, the smallest first.

    ``options`` are those of :func:`plan`. The model is captured once.

    >>> for trade in fxshard.frontend.planning.sweep(model, inputs, world_size=8, hardware="h200"):
    ...     print(trade.bytes, trade.seconds, [each.name for each in trade.recomputed])
    """
    given = Options(**{"hardware": "h200", **options, "memory_budget": 1})
    ranks, report = _Ranks(world_size, shard_size, groups, mesh, parallelize), progress or (lambda stage: None)
    partitioned, sharding = _partitioned(model, example_inputs, given, ranks, optimizer, None, None, report)
    report("scheduling")
    return trade(partitioned, sharding)


@dataclass(frozen=True)
class _Ranks:
    """How many ranks there are, and what they have in common."""

    world_size: int | None
    shard_size: int | None
    groups: Mapping[str, Any] | None
    mesh: MeshShape | None
    parallelize: Parallelize | None


def _partitioned(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    options: Options,
    ranks: _Ranks,
    optimizer: AdamW | Muon | None,
    profile: Profile | None,
    watching: Observer | None,
    report: Callable[[str], None],
) -> tuple[Partitioned, ShardingPlan]:
    """A captured and partitioned step, and what scheduling it depends on."""
    _check_capturable(model)
    experts = options.experts
    if experts != "off":  # the plan is for another machine; which kernel computes experts is no part of it
        options = replace(options, experts="torch")
    assert options.hardware is not None
    machine = known(options.hardware)
    device = "cpu" if machine.name == "cpu" else "cuda"
    with contextlib.ExitStack() as stack:
        if ranks.mesh is None:
            domains = _domains(ranks, options.reduction, device)
            if ranks.parallelize is not None:
                raise ConfigError("parallelize= cuts a model for the dimensions of mesh=, which is not given")
        else:
            if ranks.world_size is not None or ranks.shard_size is not None:
                raise ConfigError("mesh= says how many ranks there are: leave out world_size= and shard_size=")
            planned = stack.enter_context(planned_mesh(ranks.mesh, device))
            domains = planned.domains(options.reduction, ranks.groups)
            model = parallelized(model, ranks.parallelize, planned.mesh)
        domain = domains[0]
        chosen = matrices(optimizer, model) if isinstance(optimizer, Muon) else ()
        state = state_choice(optimizer)
        sharding = ShardingPlan(
            plan_model(model, domains, options, chosen, state=state),
            options,
            group=domain.group(domain.ranks) if domain.device else "none",
            ranks=domain.ranks,
            hardware=machine,
            profile=profile,
            own_optimizer=optimizer is not None,
            measures_logits=optimizer is not None and optimizer.qk_clip is not None,
            one_graph=True,
            planned_experts=experts,
            state=state,
        )
        return partition_model(model, inputs, sharding, watching, report), sharding


def _domains(ranks: _Ranks, reduction: Reduction, device: str) -> list[Domain]:
    """The model's own ranks, then those of ``groups``."""
    world_size, shards = ranks.world_size, ranks.shard_size
    if not is_count(world_size):
        raise ConfigError(f"world_size={world_size!r}: expected the number of data-parallel ranks, 1 or more")
    shards = world_size if shards is None else shards
    if not is_count(shards) or world_size % shards:
        raise ConfigError(f"shard_size={shards!r}: expected a number of ranks that divides world_size={world_size}")
    domain = data_parallel(shards, world_size // shards, reduction, device)
    return [domain, *planned_domains(ranks.groups, domain)]


def _check_capturable(model: nn.Module) -> None:
    if isinstance(model, ShardedModule) or any(sharding_of(parameter) for parameter in model.parameters()):
        raise StateError(
            "this model is compiled or sharded already, and its parameters hold no values to plan with: plan the plain "
            "module before fxshard.compile, or another one, on the meta device if it is large"
        )
    if torch.get_default_device().type == "meta":
        raise ConfigError(
            'fxshard.plan was called below `with torch.device("meta")`, which reaches into the capture: make model and '
            "inputs there, and plan after that block"
        )


def partition_model(
    model: nn.Module,
    inputs: Any,
    plan: ShardingPlan,
    watching: Observer | None = None,
    report: Callable[[str], None] = lambda stage: None,
    absent: AbsentLayers | None = None,
) -> Partitioned:
    """Capture a hollow copy of a model and partition it; nothing runs. ``absent``: layers that are not captured."""
    precision = plan.options.precision
    hollow = _hollow_copy(model, precision)
    parameters = dict(hollow.named_parameters())
    refs = {
        id(parameters[name]): ParamRef(bucket.index, position)
        for bucket in plan.buckets
        for position, name in enumerate(bucket.params)
    }
    if absent is not None:
        absent.remove(hollow)
    found: list[Partitioned] = []

    def backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        plain = plain_graph(graph)
        if plain is not None:
            graph = plain.graph
            given = [example_inputs[i] for i in plain.kept]
            example_inputs = [_local_leaf(value) if isinstance(value, DTensor) else value for value in given]
        own = [refs.get(id(value)) for value in graph_inputs(graph)]
        tie_parameters(graph, own)
        context = plan.context(Phase.FORWARD, watching)
        graph = before_autograd(graph, context)
        results = outputs_without_values(graph)
        results = results[:-1] if context.heads else results
        with partitioned_step(graph, own, example_inputs, plan, watching, report, absent) as step:
            found.append(step.partitioned)
        return (lambda *args: results) if plain is None else plain.called(lambda *args: results)

    values = tree_map_only(torch.Tensor, _real, inputs)
    if precision is not None and precision.param is not None and precision.cast_inputs:
        values = cast_floats(values, precision.param)
    report("capturing")
    with private.lazy_graph_modules():
        _call_captured(hollow, backend, values)
    return found[-1]


def _hollow_copy(model: nn.Module, precision: Precision | None) -> nn.Module:
    """A copy of the model whose parameters have shapes and dtypes but no memory, on the CPU."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        dtype = parameter.dtype
        if precision is not None and precision.param is not None and dtype.is_floating_point:
            dtype = precision.param
        memo[id(parameter)] = nn.Parameter(hollow_like(parameter, dtype, CPU), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _real(buffer)
    return copy.deepcopy(model, memo)


def _local_leaf(value: DTensor) -> torch.Tensor:
    """What a graph takes in the place of a DTensor."""
    return nn.Parameter(private.wrapped(value), value.requires_grad)


def _real(value: torch.Tensor) -> torch.Tensor:
    """Inputs and buffers are small and may be looked at while tracing: zeros where there is nothing on meta."""
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu") if value.is_meta else value.detach().cpu()


def explain(
    model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], *, experts: str = "auto"
) -> ExpertsReport:
    """Which mixture-of-experts MLPs of a model are fused, by which implementation, and which are not, and why.

    Captures the model as ``fxshard.compile`` does and runs nothing. ``experts`` is the option of ``fxshard.compile``.

    >>> print(fxshard.explain(model, (tokens, targets)))
    layers.0.moe.experts and 3 more fused by torch: 8 experts, SwiGLU, gate and up separate
    """
    buckets = model._sharding.plans if isinstance(model, ShardedModule) else ()
    context = PassContext(buckets, Options(experts=experts), Phase.FORWARD)

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before_autograd(graph, context)
        results = outputs_without_values(graph)
        return lambda *args: results

    plain = model._inner if isinstance(model, ShardedModule) else model
    _call_captured(plain, backend, example_inputs)
    return context.experts


def _call_captured(model: nn.Module, backend: Callable[..., Any], inputs: Any) -> None:
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    try:
        capture(model, backend, dynamic=False)(*args, **Calls(model).keywords(args, kwargs))
    except FAILURES as error:
        raise explained(error, model) from error
