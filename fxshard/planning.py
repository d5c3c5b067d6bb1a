"""``fxshard.plan``: the schedule of a model for any number of ranks, from shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from fxshard import _compat
from fxshard.backend import Backend, graph_inputs
from fxshard.capture import FAILURES, capture, cast_floats, explained
from fxshard.captured_graph import Capture
from fxshard.config import AdamW, Muon, Options, Precision, parse_bytes
from fxshard.errors import ConfigError, StateError
from fxshard.garbage import no_garbage_collection
from fxshard.groups import planned_domains
from fxshard.inspect.schedule import Schedule
from fxshard.module import ShardedModule
from fxshard.optim.muon_rule import matrices
from fxshard.passes.context import ParamRef
from fxshard.passes.pass_list import PassList
from fxshard.plan.choice import LayoutKind
from fxshard.plan.domain import Reduction, data_parallel
from fxshard.plan.hardware import Hardware
from fxshard.plan.hardware import hardware as known
from fxshard.plan.units import UnitPatterns
from fxshard.precision.policy import check_precision
from fxshard.profile import Profile
from fxshard.repetition.expansion import Shortened
from fxshard.repetition.periods import Unrepeatable
from fxshard.repetition.shorten import shorten
from fxshard.runtime.hollow import hollow_like
from fxshard.sharding import Sharding, check_placement, plan_model, register, sharding_of, unsharded
from fxshard.stack import in_one_piece

STAGES = ("capturing", "differentiating", "partitioning", "scheduling")
"""What planning does, in order. Each takes a good part of the time."""


def plan(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    world_size: int,
    shard_size: int | None = None,
    hardware: str | Hardware = "h200",
    zero: int = 3,
    units: UnitPatterns | None = None,
    optimizer: AdamW | Muon | None = None,
    precision: Precision | None = None,
    layout: LayoutKind = "auto",
    reduction: Reduction = "mean",
    groups: Mapping[str, int] | None = None,
    memory_budget: int | str | None = None,
    prefetch: int | None = None,
    keep_resident: bool = True,
    defer_wgrad: bool = True,
    lowering: str = "inductor",
    verify: bool = True,
    profile: Profile | None = None,
    trace_once: bool = True,
    progress: Callable[[str], None] | None = None,
    experts: str = "auto",
    passes: PassList | None = None,
) -> Schedule:
    """The schedule that ``fxshard.compile`` would emit on ``world_size`` ranks: no process group, no GPU, no weights.

    The model and the inputs may be on the meta device. Nothing of them is changed. ``shard_size``: over how many ranks
    parameters are sharded; each shard then has ``world_size / shard_size`` replicas (HSDP). Default: over all.
    ``groups``: of parameters that match a pattern, the number of ranks that hold the same. With ``trace_once`` repeated
    layers go through autograd once, not one by one; the schedule is the same. A ``profile`` of a run replaces estimated
    durations. ``progress`` is called with the name of each of ``STAGES`` when it begins.

    >>> with torch.device("meta"):
    ...     model = Transformer(config)
    >>> tokens = torch.empty(1, 4096, dtype=torch.int64, device="meta")
    >>> schedule = fxshard.plan(model, (tokens, tokens), world_size=1024, hardware="h200", memory_budget="60GiB")
    >>> print(schedule, schedule.simulate("h200").step_seconds)
    """
    _check_capturable(model)
    shards = _shards(world_size, shard_size)
    check_placement(zero, layout)
    check_precision(precision)
    machine = known(hardware)
    options = Options(
        lowering=lowering,
        prefetch=prefetch,
        keep_resident=keep_resident,
        defer_wgrad=defer_wgrad,
        memory_budget=parse_bytes(memory_budget),
        hardware=machine,
        verify=verify,
        experts=experts,
        passes=passes,
    )
    if experts != "off":  # the plan is for another machine; which kernel computes experts is no part of it
        options = replace(options, experts="torch")
    domain = data_parallel(shards, world_size // shards, reduction, "cpu" if machine.name == "cpu" else "cuda")
    sharding = replace(
        unsharded(options, torch.device("cpu")),
        plans=plan_model(
            model,
            [domain, *planned_domains(groups, domain)],
            zero=zero,
            units=units,
            precision=precision,
            layout=layout,
            matrices=matrices(optimizer, model) if isinstance(optimizer, Muon) else (),
        ),
        precision=precision,
        zero=zero,
        group_name=domain.group(world_size) if domain.device else "none",
        ranks=world_size,
        own_optimizer=optimizer is not None,
        hardware=machine,
        profile=profile,
        planned_experts=experts,
    )
    return _schedule(model, example_inputs, sharding, trace_once, progress or (lambda stage: None))


def _check_capturable(model: nn.Module) -> None:
    if isinstance(model, ShardedModule) or any(sharding_of(parameter) for parameter in model.parameters()):
        raise StateError(
            "this model is compiled or sharded already, and its parameters hold no values to plan with: plan the plain "
            "module before fxshard.compile, or another one, on the meta device if it is large"
        )
    if torch.get_default_device().type == "meta":
        raise ConfigError(
            'fxshard.plan was called below `with torch.device("meta")`, which reaches into the capture: make model and '
            "inputs there, and plan behind that block"
        )


def _shards(world_size: int, shard_size: int | None) -> int:
    """Over how many ranks parameters are sharded."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size={world_size!r}: expected the number of data-parallel ranks, 1 or more")
    shards = world_size if shard_size is None else shard_size
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1 or world_size % shards:
        raise ConfigError(f"shard_size={shard_size!r}: expected a number of ranks that divides world_size={world_size}")
    return shards


def _schedule(
    model: nn.Module, inputs: Any, sharding: Sharding, trace_once: bool, report: Callable[[str], None]
) -> Schedule:
    """Capture a hollow copy of the model with a backend that runs nothing."""
    precision = sharding.precision
    twin = _hollow_twin(model, precision)
    parameters = dict(twin.named_parameters())
    for bucket in sharding.plans:
        for position, name in enumerate(bucket.params):
            register(parameters[name], sharding, ParamRef(bucket.index, position))
    names = {id(tensor): name for name, tensor in [*parameters.items(), *twin.named_buffers()]}
    try:
        return _capture(twin, inputs, _Planner(sharding, names if trace_once else {}, report), precision)
    except Unrepeatable:
        return _capture(twin, inputs, _Planner(sharding, {}, report), precision)


class _Planned(BaseException):
    """Thrown by the planned program in place of running it: everything that planning needs has happened by then."""


def _stop_here(split: fx.GraphModule) -> Callable[..., Any]:
    def run(args: list[Any]) -> Any:
        raise _Planned

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Planner(Backend):
    """A backend that runs nothing. With the ``names`` of parameters and buffers it traces repeated layers once."""

    def __init__(self, sharding: Sharding, names: Mapping[int, str], report: Callable[[str], None]) -> None:
        super().__init__(sharding, lower=_stop_here)
        self._names = names
        self.report = report
        self.one_graph = True

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        names = [self._names.get(id(value)) for value in graph_inputs(graph)]
        refs = self.refs(graph)
        graph = self.before_autograd(graph, refs)
        short = shorten(graph, names)
        if short is None:
            return self.compile(Capture(self, refs, graph), graph, example_inputs)
        capture = _ShortCapture(self, refs, short)
        return self.compile(capture, short.graph, [example_inputs[i] for i in short.kept])


class _ShortCapture(Capture):
    """A graph with layers left out. They are back before it is partitioned, and that is where AOTAutograd's part ends:
    what it knows of the graph is wrong from then on.
    """

    def __init__(self, backend: Backend, refs: list[ParamRef | None], short: Shortened) -> None:
        super().__init__(backend, refs)
        self._short = short

    def partition(
        self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._backend.report("partitioning")
        self._outputs = kwargs["num_fwd_outputs"]
        forward, backward = self._parts(self._backend.rewrite_joint(joint), self._short, self._outputs, ())
        self._keep_backward(backward)
        self.compile_forward(forward, inputs)
        raise _Planned

    def compile_evaluation(self, forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise Unrepeatable


def _capture(twin: nn.Module, inputs: Any, backend: Backend, precision: Precision | None) -> Schedule:
    values = tree_map_only(torch.Tensor, _real, inputs)
    if precision is not None and precision.param is not None and precision.cast_inputs:
        values = cast_floats(values, precision.param)
    args, kwargs = ((), dict(values)) if isinstance(values, Mapping) else (tuple(values), {})
    backend.report("capturing")
    try:
        with no_garbage_collection(), _compat.lazy_graph_modules():
            in_one_piece(capture(twin, backend, dynamic=False), *args, **kwargs)
    except _Planned:
        pass
    except FAILURES as error:
        raise explained(error, twin) from error
    return backend.schedules.get("train") or backend.schedules["eval"]


def _hollow_twin(model: nn.Module, precision: Precision | None) -> nn.Module:
    """A copy of the model whose parameters have shapes and dtypes but no memory, on the CPU."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        dtype = parameter.dtype
        if precision is not None and precision.param is not None and dtype.is_floating_point:
            dtype = precision.param
        hollow = nn.Parameter(hollow_like(parameter, dtype, torch.device("cpu")), parameter.requires_grad)
        memo[id(parameter)] = hollow
    for buffer in model.buffers():
        memo[id(buffer)] = _real(buffer)
    return copy.deepcopy(model, memo)


def _real(value: torch.Tensor) -> torch.Tensor:
    """Inputs and buffers are small and may be looked at while tracing: zeros where there is nothing on meta."""
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu") if value.is_meta else value.detach().cpu()
