"""``fxshard.MXFP8``: which linears run in MXFP8, and how their weights are gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from fxshard.config import Precision
from fxshard.errors import ConfigError
from fxshard.precision.modes import Gather
from fxshard.precision.mxfp8 import BLOCK

CHOICES = ("auto", "staged", "direct", "off")
Chooser = Callable[[str, tuple[int, ...]], bool]


@dataclass(frozen=True)
class MXFP8(Precision):
    """Chosen linears multiply in MXFP8: forward, input gradient and weight gradient. The rest computes in bf16.

    ``linears``: patterns of ``nn.Linear`` names, or a function of name and weight shape; ``exclude``: patterns that are
    left out again. A linear whose weight has a dimension that 32 does not divide, or whose weight something else than a
    linear uses too, stays in bf16; naming it without a wildcard is an error. ``gather``: ``"staged"`` moves bf16 and
    quantizes on every rank (ZeRO-1 and 2), ``"direct"`` moves the quantized copies (ZeRO-3), ``"auto"`` takes the one
    for the stage, ``"off"`` moves bf16 and quantizes where it multiplies. None of them changes a result. ``reduce`` and
    ``master`` are as in :class:`fxshard.Precision`.

    >>> fxshard.compile(model, zero=3, precision=fxshard.MXFP8(exclude=("head", "layers.0.*")))
    """

    param: torch.dtype | None = torch.bfloat16
    reduce: torch.dtype | None = torch.float32
    linears: tuple[str, ...] | Chooser = ("*",)
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
        for field in ("linears", "exclude"):
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
    """Weights (by parameter name) that are quantized, and why other linears are not."""

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
    """The linears that a policy quantizes. Pure: depends on names and shapes only, so all ranks agree."""
    if not isinstance(policy, MXFP8):
        return ChosenLinears(frozenset(), {})
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module))
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    _check_patterns(policy, [name for name, _ in linears])

    chosen: set[str] = set()
    left_out: dict[str, str] = {}
    for name, linear in linears:
        if not _wanted(policy, name, tuple(linear.weight.shape)):
            left_out[name] = "not chosen"
            continue
        problem = _problem(linear, owners[id(linear.weight)])
        if problem is None:
            chosen.add(name_of[id(linear.weight)])
        elif not callable(policy.linears) and name in policy.linears:
            raise ConfigError(
                f"MXFP8(linears=...) names {name!r}, which cannot be quantized: {problem}; leave it out, or change it"
            )
        else:
            left_out[name] = problem
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:4]) or "it has no nn.Linear"
        raise ConfigError(
            f"MXFP8 chooses no linear of {type(model).__name__} ({reasons}); use fxshard.Precision instead"
        )
    return ChosenLinears(frozenset(chosen), left_out)


def _wanted(policy: MXFP8, name: str, shape: tuple[int, ...]) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in policy.exclude):
        return False
    if callable(policy.linears):
        return bool(policy.linears(name, shape))
    return any(fnmatchcase(name, pattern) for pattern in policy.linears)


def _problem(linear: nn.Linear, owners: list[tuple[str, nn.Module]]) -> str | None:
    rows, columns = linear.weight.shape
    if rows % BLOCK or columns % BLOCK:
        return f"its weight is {rows} × {columns}, and {BLOCK} does not divide both"
    others = [name for name, owner in owners if not isinstance(owner, nn.Linear)]
    if others:
        return f"its weight is also that of {others[0]!r}"
    return None


def _check_patterns(policy: MXFP8, names: list[str]) -> None:
    for pattern in () if callable(policy.linears) else policy.linears:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:6])
            raise ConfigError(
                f"MXFP8(linears=...): {pattern!r} matches no nn.Linear of the model, which has {shown} ..."
            )
