"""Hollow tensors: shape, strides and dtype, but no memory. It is what is left of a parameter that was sharded."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fxshard._torch import private
from fxshard._torch.errors import StateError

_TAKEN = (
    "this parameter belongs to a plain model that was given to fxshard.compile or fxshard.shard, which took its values"
    ": use the model that they returned, and its full_state_dict() for whole weights"
)


def hollow_like(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """A tensor that looks like another one and holds nothing."""
    hollow = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor.device)
    hollow.untyped_storage().resize_(0)
    private.forbid_writes(hollow)
    return hollow


def refuse_copies(parameter: torch.Tensor) -> None:
    """A parameter that was made hollow is neither copied nor pickled: there are no values."""
    parameter.__deepcopy__ = parameter.__reduce_ex__ = _refuse  # type: ignore[attr-defined,method-assign,assignment]


def _refuse(*args: Any) -> NoReturn:
    raise StateError(_TAKEN)


def is_hollow(value: object) -> bool:
    """Whether reading a tensor would read memory that is not there."""
    return (
        isinstance(value, torch.Tensor)
        and value.numel() > 0
        and not value.is_meta
        and not value.untyped_storage().nbytes()
    )


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory is; 0 for one that has none."""
    return 0 if is_hollow(tensor) else tensor.data_ptr()
