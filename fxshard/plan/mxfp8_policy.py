"""``fxshard.MXFP8``: which linears and experts run in MXFP8, and how their weights are gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from fxshard._torch.errors import ConfigError
from fxshard.kernels.mxfp8 import BLOCK
from fxshard.plan.gather_modes import Gather
from fxshard.plan.precision import Precision

CHOICES = ("auto", "staged", "direct", "off")
Chooser = Callable[[str, tuple[int, ...]], bool]


@dataclass(frozen=True)
class MXFP8(Precision):
    """Chosen linears and experts multiply in MXFP8: forward, input gradient and weight gradient. The rest is bf16.

    ``linears``: patterns of ``nn.Linear`` names, or a function of name and weight shape; ``experts``: the same for
    parameters ``[experts, rows, columns]`` that grouped products multiply; ``exclude``: patterns that are left out
    again. What has a dimension that 32 does not divide, or is a linear's weight that something else than a linear uses
    too, stays in bf16; naming it without a wildcard is an error. ``gather``: ``"staged"`` moves bf16 and
    quantizes on every rank (ZeRO-1 and 2), ``"direct"`` moves the quantized copies (ZeRO-3), ``"auto"`` takes the one
    for the stage, ``"off"`` moves bf16 and quantizes where it multiplies. None of them changes a result. ``reduce`` and
    ``master`` are as in :class:`fxshard.Precision`.

    >>> fxshard.compile(model, zero=3, precision=fxshard.MXFP8(exclude=("head", "layers.0.*")))
    """

    param: torch.dtype | None = torch.bfloat16
    reduce: torch.dtype | None = torch.float32
    linears: tuple[str, ...] | Chooser = ("*",)
    experts: tuple[str, ...] | Chooser = ("*",)
    exclude: tuple[str, ...] = ("*head", "*output", "*router")
    gather: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.param is not torch.bfloat16:
            raise ConfigError(
                f"MXFP8(param={self.param}): what is quantized is bfloat16, as in Transformer Engine; do not set it"
            )
        if self.gather not in CHOICES:
            raise ConfigError(f"MXFP8(gather={self.gather!r}): expected one of {', '.join(map(repr, CHOICES))}")
        for field in ("linears", "experts", "exclude"):
            value = getattr(self, field)
            if isinstance(value, str):
                raise ConfigError(f"MXFP8({field}={value!r}): expected a tuple of patterns, ({value!r},)")

    def mode(self, zero: int) -> Gather:
        """How the weights of chosen linears travel under a ZeRO stage."""
        fitting = Gather.DIRECT if zero == 3 else Gather.STAGED
        if self.gather == "auto":
            return fitting
        if self.gather != "off" and self.gather != fitting:
            why = (
                "forward and backward each need one copy, and staging would move bf16 for both"
                if zero == 3
                else "both copies are needed at once, which is more bytes than the bf16 they are made from"
            )
            raise ConfigError(
                f"MXFP8(gather={self.gather!r}) with zero={zero}: {why}; use gather={fitting.value!r} or 'auto'"
            )
        return Gather(self.gather)


@dataclass(frozen=True)
class ChosenLinears:
    """Weights (by parameter name) that are quantized, and why other linears and experts are not."""

    weights: frozenset[str]
    left_out: dict[str, str]


def check_precision(precision: object) -> None:
    """Refuse what is no precision policy, before anything is changed."""
    if precision is not None and not isinstance(precision, Precision):
        raise ConfigError(
            f"precision={precision!r}: expected fxshard.Precision(...) or fxshard.MXFP8(...); other FP8 recipes "
            "(delayed or current scaling, blockwise) are not supported"
        )


def choose_linears(model: nn.Module, policy: Precision | None) -> ChosenLinears:
    """What a policy quantizes. Pure: depends on names and shapes only, so all ranks agree."""
    if not isinstance(policy, MXFP8):
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
        _check_patterns(field, wanted, what, list(candidates))
        for name, weight in candidates.items():
            if not _wanted(wanted, policy.exclude, name, tuple(weight.shape)):
                left_out[name] = "not chosen"
                continue
            problem = _problem(weight, owners[id(weight)] if field == "linears" else [])
            if problem is None:
                chosen.add(name_of[id(weight)])
            elif not callable(wanted) and name in wanted:
                raise ConfigError(
                    f"MXFP8({field}=...) names {name!r}, which cannot be quantized: {problem}; leave it out, or "
                    "change it"
                )
            else:
                left_out[name] = problem
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:4]) or "it has no nn.Linear"
        raise ConfigError(
            f"MXFP8 chooses no linear of {type(model).__name__} ({reasons}); use fxshard.Precision instead"
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


def _problem(weight: torch.Tensor, owners: list[tuple[str, nn.Module]]) -> str | None:
    *_, rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        return f"its weight is {' × '.join(map(str, weight.shape))}, and {BLOCK} does not divide both"
    others = [name for name, owner in owners if not isinstance(owner, nn.Linear)]
    if others:
        return f"its weight is also that of {others[0]!r}"
    return None


def _check_patterns(field: str, wanted: tuple[str, ...] | Chooser, what: str, names: list[str]) -> None:
    for pattern in () if callable(wanted) else wanted:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            shown = f"which has {', '.join(names[:6])} ..." if names else "which has none"
            raise ConfigError(f"MXFP8({field}=...): {pattern!r} matches no {what} of the model, {shown}")
