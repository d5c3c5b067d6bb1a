"""What a user chooses: precision, optimizer and the options of a compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxshard.errors import ConfigError


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


@dataclass(frozen=True)
class Options:
    """How the captured graphs are scheduled and lowered.

    ``prefetch``: how many gathers run ahead of the one in use; 0 gathers when needed. ``overlap``: collectives run
    beside compute; off, each one is waited for where it starts. ``arena``: buffers have planned places in one
    allocation; off, each is allocated when needed. None of them changes a result.
    """

    lowering: str = "inductor"
    prefetch: int = 1
    overlap: bool = True
    arena: bool = True

    def __post_init__(self) -> None:
        if self.lowering not in LOWERINGS:
            raise ConfigError(f"lowering={self.lowering!r}: expected one of {', '.join(map(repr, LOWERINGS))}")
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ConfigError(f"prefetch={self.prefetch!r}: expected the number of gathers to run ahead, 0 or more")

    @classmethod
    def from_dict(cls, options: dict[str, Any] | None) -> Options:
        """Options as ``torch.compile(..., options={...})`` passes them."""
        known = cls.__dataclass_fields__
        for name in options or {}:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; known options: {', '.join(known)}")
        return cls(**(options or {}))
