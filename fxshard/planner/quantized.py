"""The base of policies that quantize weights: how they choose linears and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from fxshard._torch.errors import ConfigError
from fxshard.planner.gather_modes import Float8Recipe, Gather
from fxshard.planner.precision import Precision

Chooser = Callable[[str, tuple[int, ...]], bool]


@dataclass(frozen=True)
class Quantized(Precision):
    """Products with chosen weights run in fewer bits than bf16, in which everything else is computed."""

    param: torch.dtype | None = torch.bfloat16
    reduce: torch.dtype | None = torch.float32
    linears: tuple[str, ...] | Chooser = ("*",)
    experts: tuple[str, ...] | Chooser = ()
    exclude: tuple[str, ...] = ("*head", "*output", "*router")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.param is not torch.bfloat16:
            raise ConfigError(
                f"{self.name}(param={self.param}): what is quantized is bfloat16, as in Transformer Engine; do not "
                "set it"
            )
        for field in ("linears", "experts", "exclude"):
            value = getattr(self, field)
            if isinstance(value, str):
                raise ConfigError(f"{self.name}({field}={value!r}): expected a tuple of patterns, ({value!r},)")

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def recipe(self) -> Float8Recipe | None:
        """How products run in float8; None: in MXFP8."""
        return None

    @property
    def cut(self) -> int:
        """A matrix is sharded in multiples of so many rows, so that every owner can quantize alone."""
        return 1

    def mode(self, zero: int) -> Gather:
        """How the weights of chosen linears travel under a ZeRO stage."""
        raise NotImplementedError

    def problem(self, shape: tuple[int, ...], named: bool) -> str | None:
        """Why a weight of this shape stays in bf16; ``named``: it was chosen by its name."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChosenLinears:
    """Weights (by parameter name) that are quantized, and why other linears and experts are not."""

    weights: frozenset[str]
    left_out: dict[str, str]


def check_precision(precision: object) -> None:
    """Refuse what is no precision policy, before anything is changed."""
    if precision is not None and not isinstance(precision, Precision):
        raise ConfigError(
            f"precision={precision!r}: expected fxshard.Precision(...), fxshard.MXFP8(...) or fxshard.Float8(...)"
        )


def choose_linears(model: nn.Module, policy: Precision | None) -> ChosenLinears:
    """The weights that a policy quantizes. Pure: depends on names and shapes only, so all ranks agree."""
    if not isinstance(policy, Quantized):
        return ChosenLinears(frozenset(), {})
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module))
    linears = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    stacks = {
        name: parameter
        for name, parameter in model.named_parameters()
        if _is_stack(parameter, [module for _, module in owners[id(parameter)]])
    }
    chosen: set[str] = set()
    left_out: dict[str, str] = {}
    for field, what, candidates in (("linears", "nn.Linear", linears), ("experts", "stack of weights", stacks)):
        wanted: tuple[str, ...] | Chooser = getattr(policy, field)
        _check_patterns(policy, field, what, list(candidates))
        for name, weight in candidates.items():
            if not _wanted(wanted, policy.exclude, name, tuple(weight.shape)):
                left_out[name] = "not chosen"
                continue
            named = not callable(wanted) and name in wanted
            problem = policy.problem(tuple(weight.shape), named)
            if problem is None and field == "linears":
                problem = _shared(owners[id(weight)])
            if problem is None:
                chosen.add(name_of[id(weight)])
            elif named:
                raise ConfigError(
                    f"{policy.name}({field}=...) names {name!r}, which cannot be quantized: {problem}; leave it "
                    "out, or change it"
                )
            else:
                left_out[name] = problem
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:4]) or "it has no nn.Linear"
        raise ConfigError(
            f"{policy.name} chooses no linear of {type(model).__name__} ({reasons}); use fxshard.Precision instead"
        )
    return ChosenLinears(frozenset(chosen), left_out)


def _is_stack(parameter: nn.Parameter, owners: list[nn.Module]) -> bool:
    """Whether it may be the weights of experts: several matrices, and none of torch's own modules (a convolution)."""
    own = any(type(owner).__module__.startswith("torch.nn.") for owner in owners)
    return parameter.ndim == 3 and parameter.shape[0] > 1 and not own


def _wanted(wanted: tuple[str, ...] | Chooser, exclude: tuple[str, ...], name: str, shape: tuple[int, ...]) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in exclude):
        return False
    if callable(wanted):
        return bool(wanted(name, shape))
    return any(fnmatchcase(name, pattern) for pattern in wanted)


def _shared(owners: list[tuple[str, nn.Module]]) -> str | None:
    others = [name for name, owner in owners if not isinstance(owner, nn.Linear)]
    return f"its weight is also that of {others[0]!r}" if others else None


def _check_patterns(policy: Quantized, field: str, what: str, names: list[str]) -> None:
    wanted: tuple[str, ...] | Chooser = getattr(policy, field)
    for pattern in () if callable(wanted) else wanted:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            shown = f"which has {', '.join(names[:6])} ..." if names else "which has none"
            raise ConfigError(f"{policy.name}({field}=...): {pattern!r} matches no {what} of the model, {shown}")
