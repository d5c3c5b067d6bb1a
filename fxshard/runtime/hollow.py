"""Hollow tensors: shape, strides and dtype, but no memory. It is what is left of a parameter that was sharded."""

from __future__ import annotations

import torch


def hollow_like(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """A tensor that looks like another one and holds nothing."""
    hollow = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor.device)
    hollow.untyped_storage().resize_(0)
    return hollow


def is_hollow(value: object) -> bool:
    """Whether reading a tensor would read memory that is not there."""
    return (
        isinstance(value, torch.Tensor)
        and value.numel() > 0
        and not value.is_meta
        and not value.untyped_storage().nbytes()
    )
