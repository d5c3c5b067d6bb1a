"""Optimizers of ``torch.optim`` over sharded parameters: those that need whole tensors are refused when they are made.

An update that treats every element by itself is right on the rows that a rank holds. One that looks at a matrix (Muon,
Adafactor) or at all parameters (LBFGS) computes something else on each rank, and waits for ranks that hold no rows.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.runtime.uneven_rows import UnevenRows

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.RMSprop,
)
FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Those whose fused kernels torch knows how to run on sharded tensors."""

_hook: Any = None


class ShardedParameter(DTensor):
    """A parameter of which ranks hold different rows."""

    __slots__ = ()

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Of every parameter that it is given, an optimizer asks this first: it has no other hook for its making."""
        asked_by = sys._getframe(1).f_locals.get("self")
        if isinstance(asked_by, Optimizer):
            check(asked_by, asked_by.defaults)
        return super().is_leaf

    # Copies are parameters of nobody's; what is saved is a DTensor as torch makes it.
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = torch.nn.Parameter(private.as_dtensor(self), self.requires_grad)
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_cut"})
        return plain.__reduce_ex__(protocol)


class UnevenParameter(ShardedParameter, UnevenRows):
    """One of which ranks hold other numbers of rows than torch would give them."""


def mark(parameter: torch.Tensor) -> None:
    """From now on an optimizer that is made with ``parameter``, or steps over it, is checked."""
    global _hook
    parameter.__class__ = UnevenParameter if isinstance(parameter, UnevenRows) else ShardedParameter
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)


def check(optimizer: Optimizer, options: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if torch's own class cannot update rows. Classes of others are theirs to judge."""
    kind = type(optimizer)
    torchs = next(base for base in kind.__mro__ if f"{base.__module__}.".startswith("torch.optim."))
    if torchs is Optimizer:
        return
    if not issubclass(kind, ELEMENTWISE):
        raise ConfigError(
            f"torch.optim.{torchs.__name__} needs whole parameters, and each rank holds some of their rows: "
            f"use {_names(ELEMENTWISE)}, or optimizer=fxshard.Muon(...) for Muon; zero=0 keeps parameters whole"
        )
    if options.get("fused") and not issubclass(kind, FUSED):
        raise ConfigError(
            f"torch has no fused {kind.__name__} for sharded parameters (there is one of {_names(FUSED)}): leave out "
            "fused=True"
        )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if any(isinstance(parameter, ShardedParameter) for parameter in group["params"]):
            check(optimizer, group)


def _names(classes: tuple[type[Optimizer], ...]) -> str:
    return ", ".join(kind.__name__ for kind in classes)
