"""Which implementation runs experts on this machine, and why another one cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from fxshard.errors import ConfigError
from fxshard.fused.by_torch import TorchExperts
from fxshard.fused.glu import SWIGLU, Glu

EXPERTS = ("auto", "torch", "triton", "te", "off")
"""Values of the option ``experts``: the fastest that runs here, one by name, or leave the model as it is written."""


@dataclass(frozen=True)
class Case:
    """What an implementation must be able to run."""

    device: torch.device
    dtype: torch.dtype
    hidden: int
    inner: int
    joined: bool = True
    transposed: bool = True
    """Whether weights lie in memory as ``[experts, out, in]``, as those of ``nn.Linear`` do."""
    biased: bool = False
    glu: Glu = SWIGLU


@cache
def implementation(name: str) -> TorchExperts:
    """The implementation of that name. Whether it can run is asked of ``refusal``."""
    return _MAKE[name]()


def refusal(name: str, case: Case) -> str | None:
    """The first gate that keeps an implementation from running this, or None."""
    return _REFUSALS[name](case)


def choose(requested: str, case: Case) -> str:
    """The implementation to use. One that was asked for and cannot run is an error that names the gate."""
    if requested == "auto":
        return next(name for name in _FASTEST_FIRST if refusal(name, case) is None)
    reason = refusal(requested, case)
    if reason is not None:
        raise ConfigError(f'experts="{requested}" cannot run these experts: {reason}; use experts="auto"')
    return requested


def _triton_refusal(case: Case) -> str | None:
    return "it needs a CUDA device" if case.device.type != "cuda" else "not there yet"


_MAKE: dict[str, Callable[[], TorchExperts]] = {"torch": TorchExperts}
_REFUSALS: dict[str, Callable[[Case], str | None]] = {
    "torch": lambda case: None,
    "triton": _triton_refusal,
    "te": _triton_refusal,
}
_FASTEST_FIRST = ("torch",)
