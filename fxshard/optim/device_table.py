"""Small tables of numbers that the host makes and kernels read."""

from __future__ import annotations

from typing import Any

import torch


def device_table(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor on the device of (lists of) numbers, for which the host does not wait.

    On a GPU they are copied from pinned memory; torch hands that out again when the copy is over, not before.
    """
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)
