"""What a user chooses: precision, optimizer and the options of a compilation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxshard.errors import ConfigError
from fxshard.fused.choose import EXPERTS
from fxshard.plan.hardware import Hardware


@dataclass(frozen=True)
class Precision:
    """Mixed precision: compute and gather in ``param``, reduce gradients in ``reduce``, keep masters in ``master``.

    ``None`` keeps the dtype the model has (for ``reduce``: the dtype of ``param``). With ``cast_inputs`` floating-point
    inputs of the model are cast to ``param``, as FSDP2 does.

    >>> fxshard.compile(model, precision=fxshard.Precision(param=torch.bfloat16, reduce=torch.float32))
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = torch.float32
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("param", "reduce", "master"):
            dtype = getattr(self, field)
            if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
                raise ConfigError(f"Precision({field}={dtype!r}): expected a floating-point torch.dtype or None")


@dataclass(frozen=True)
class AdamW:
    """AdamW over the flat shards: one fused pass per bucket, equal to ``torch.optim.AdamW``.

    ``decay`` decides by name and shape which parameters decay; by default all of them do, as in torch.

    >>> fxshard.AdamW(lr=3e-4, weight_decay=0.1, decay=lambda name, shape: len(shape) > 1)
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decay: Callable[[str, tuple[int, ...]], bool] | None = None

    def __post_init__(self) -> None:
        checks: dict[str, bool] = {
            "lr": self.lr >= 0,
            "betas": all(0 <= beta < 1 for beta in self.betas),
            "eps": self.eps >= 0,
            "weight_decay": self.weight_decay >= 0,
        }
        for field, fine in checks.items():
            if not fine:
                raise ConfigError(f"AdamW({field}={getattr(self, field)!r}) is out of range")


LOWERINGS = ("inductor", "eager")

_UNITS = {
    "": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_bytes(budget: int | str | None) -> int | None:
    """``60GiB``, ``"1.5 GB"`` or a number of bytes."""
    if budget is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?b?)\s*", str(budget).lower())
    try:
        assert match is not None
        size = int(float(match[1]) * _UNITS[match[2] if match[2] != "b" else ""])
    except (AssertionError, KeyError, ValueError):
        raise ConfigError(f'memory_budget={budget!r}: expected bytes, or a string such as "60GiB" or "1.5GB"') from None
    if size <= 0:
        raise ConfigError(f"memory_budget={budget!r}: expected more than nothing")
    return size


@dataclass(frozen=True)
class Options:
    """How the captured graphs are scheduled and lowered.

    ``prefetch``: how many gathers run ahead of the one in use, 0 gathers when needed; None lets the cost model decide
    when each one must start. ``keep_resident``: buckets stay unsharded between forward and backward where they fit.
    ``overlap``: collectives run beside compute; off, each one is waited for where it starts. ``arena``: buffers have
    planned places in one allocation; off, each is allocated when needed. None of them changes a result.
    ``memory_budget``: bytes that shards and arena may take together on a rank. ``hardware``: the machine whose
    durations the schedule is made for; None means the one it runs on. ``verify``: check every emitted schedule.
    ``experts``: what runs mixture-of-experts MLPs: ``"auto"`` picks the fastest implementation that runs on the
    machine, ``"torch"``, ``"triton"`` or ``"te"`` that one, ``"off"`` leaves them as they are written.
    """

    lowering: str = "inductor"
    prefetch: int | None = None
    keep_resident: bool = True
    overlap: bool = True
    arena: bool = True
    memory_budget: int | None = None
    hardware: str | Hardware | None = None
    verify: bool = True
    experts: str = "auto"

    def __post_init__(self) -> None:
        if self.lowering not in LOWERINGS:
            raise ConfigError(f"lowering={self.lowering!r}: expected one of {', '.join(map(repr, LOWERINGS))}")
        if self.experts not in EXPERTS:
            raise ConfigError(f"experts={self.experts!r}: expected one of {', '.join(map(repr, EXPERTS))}")
        if self.prefetch is not None and (not isinstance(self.prefetch, int) or self.prefetch < 0):
            raise ConfigError(
                f"prefetch={self.prefetch!r}: expected the number of gathers to run ahead, 0 or more, or None"
            )

    @classmethod
    def from_dict(cls, options: dict[str, Any] | None) -> Options:
        """Options as ``torch.compile(..., options={...})`` passes them."""
        known = cls.__dataclass_fields__
        for name in options or {}:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; known options: {', '.join(known)}")
        given = dict(options or {})
        if "memory_budget" in given:
            given["memory_budget"] = parse_bytes(given["memory_budget"])
        return cls(**given)
