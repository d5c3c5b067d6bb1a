"""``fxshard.plan``: the schedule of a model for any number of ranks, from shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from fxshard.backend import Backend
from fxshard.capture import FAILURES, capture, cast_floats, explained
from fxshard.config import Options, Precision, parse_bytes
from fxshard.errors import ConfigError
from fxshard.inspect.schedule import Schedule
from fxshard.lowering import SegmentCompiler
from fxshard.passes.context import ParamRef
from fxshard.plan.buckets import LAYOUTS, LayoutKind, plan_buckets
from fxshard.plan.hardware import Hardware
from fxshard.plan.hardware import hardware as known
from fxshard.plan.placement import ZERO
from fxshard.plan.units import UnitPatterns, find_units
from fxshard.precision.policy import check_precision
from fxshard.runtime.agreement import Agreement
from fxshard.runtime.engine import Engine
from fxshard.sharding import Sharding, register


def plan(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    world_size: int,
    hardware: str | Hardware = "h200",
    zero: int = 3,
    units: UnitPatterns | None = None,
    precision: Precision | None = None,
    layout: LayoutKind = "rows",
    memory_budget: int | str | None = None,
    prefetch: int | None = None,
    keep_resident: bool = True,
    lowering: str = "inductor",
    verify: bool = True,
) -> Schedule:
    """The schedule that ``fxshard.compile`` would emit on ``world_size`` ranks: no process group, no GPU, no weights.

    The model and the inputs may be on the meta device. Nothing of them is changed.

    >>> with torch.device("meta"):
    ...     model = Transformer(config)
    >>> tokens = torch.empty(1, 4096, dtype=torch.int64, device="meta")
    >>> schedule = fxshard.plan(model, (tokens, tokens), world_size=1024, hardware="h200", memory_budget="60GiB")
    >>> print(schedule, schedule.simulate("h200").step_seconds)
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size={world_size!r}: expected the number of data-parallel ranks, 1 or more")
    if zero not in ZERO or isinstance(zero, bool):
        raise ConfigError(f"zero={zero!r}: expected 0, 1, 2 or 3")
    if layout not in LAYOUTS:
        raise ConfigError(f"layout={layout!r}: expected one of {', '.join(map(repr, LAYOUTS))}")
    check_precision(precision)
    machine = known(hardware)
    options = Options(
        lowering=lowering,
        prefetch=prefetch,
        keep_resident=keep_resident,
        memory_budget=parse_bytes(memory_budget),
        hardware=machine,
        verify=verify,
    )
    twin = _hollow_twin(model, precision)
    plans = plan_buckets(
        model, find_units(model, units), zero=zero, ranks=world_size, precision=precision, layout=layout
    )
    device = torch.device("cpu")
    sharding = Sharding(
        plans,
        [],
        Engine([], None, device, options),
        Agreement(None),
        SegmentCompiler("eager"),
        options,
        precision,
        None,
        zero,
        group_name=f"{'cpu' if machine.name == 'cpu' else 'cuda'}×{world_size}" if world_size > 1 else "none",
        ranks=world_size,
        hardware=machine,
    )
    parameters = dict(twin.named_parameters())
    for bucket in plans:
        for position, name in enumerate(bucket.params):
            register(parameters[name], sharding, ParamRef(bucket.index, position))
    return _capture(twin, example_inputs, Backend(sharding, lower=_stop_here), precision)


class _Planned(BaseException):
    """Thrown by the planned program in place of running it: everything that planning needs has happened by then."""


def _stop_here(split: fx.GraphModule) -> Callable[..., Any]:
    def run(args: list[Any]) -> Any:
        raise _Planned

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _capture(twin: nn.Module, inputs: Any, backend: Backend, precision: Precision | None) -> Schedule:
    values = tree_map_only(torch.Tensor, _real, inputs)
    if precision is not None and precision.param is not None and precision.cast_inputs:
        values = cast_floats(values, precision.param)
    args, kwargs = ((), dict(values)) if isinstance(values, Mapping) else (tuple(values), {})
    try:
        capture(twin, backend, dynamic=False)(*args, **kwargs)
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
        hollow = nn.Parameter(_hollow(parameter, dtype), parameter.requires_grad)
        memo[id(parameter)] = hollow
    for buffer in model.buffers():
        memo[id(buffer)] = _real(buffer)
    return copy.deepcopy(model, memo)


def _hollow(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(like.shape, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


def _real(value: torch.Tensor) -> torch.Tensor:
    """Inputs and buffers are small and may be looked at while tracing: zeros where there is nothing on meta."""
    return torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value.detach().cpu()
