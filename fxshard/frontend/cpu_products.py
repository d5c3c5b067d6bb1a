"""Products in bf16 and fp16 on a CPU, tried out before the first step: what torch says of them becomes one sentence.

torch gives such products to oneDNN. Where oneDNN fails on a CPU, torch warns with oneDNN's whole error, a page of C++
frames, and does without it: for good, or, on ARM, each time anew. Here that happens while a model is sharded, and is
put in our words; the warnings that follow are not shown.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist

from fxshard._torch import private

_HALVES = (torch.bfloat16, torch.float16)


def warn_of_slow_products(dtypes: Iterable[torch.dtype], device: torch.device) -> None:
    """Say once, on one rank, that this machine has no quick products in one of ``dtypes``."""
    if device.type == "cpu":
        for dtype in _HALVES:
            if dtype in dtypes:
                _try_out(dtype)


@functools.cache  # in a process: torch forgets in between which warnings it has shown
def _try_out(dtype: torch.dtype) -> None:
    if _has_products(dtype):
        return
    warnings.filterwarnings("ignore", ".*failed, switching to", UserWarning)
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            f"this CPU has no products in {str(dtype).removeprefix('torch.')}: torch computes them in another way, "
            "which is slow; compute in float32 here",
            RuntimeWarning,
            stacklevel=4,
        )


def _has_products(dtype: torch.dtype) -> bool:
    matrix = torch.ones(64, 64, dtype=dtype)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.mm(matrix, matrix)
        torch.bmm(matrix[None], matrix[None])
    return private.onednn_supports(dtype) and not any("failed, switching to" in str(each.message) for each in said)
