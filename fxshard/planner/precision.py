"""``fxshard.Precision``: which dtypes a model computes, reduces and keeps its masters in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxshard._torch.errors import ConfigError


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
