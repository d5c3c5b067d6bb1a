"""What context parallelism calls of torch: a gather with a gradient, and attention to keys before the queries."""

from __future__ import annotations

import inspect
import sys

import torch
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
"""``all_gather_tensor_autograd``, which torch 2.13 renamed."""


def context_parallel_device() -> str | None:
    """Where the mesh is for which torch's ``context_parallel`` has replaced ``scaled_dot_product_attention``; None
    outside of its block. torch 2.11, 2.13."""
    module = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if module is None or F.scaled_dot_product_attention not in module._replaced_functions:
        return None
    mesh: DeviceMesh = inspect.getclosurevars(F.scaled_dot_product_attention).nonlocals["device_mesh"]
    return mesh.device_type


def gathered(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The tensors of all ranks along the first dimension; gradients are added up and sent back. torch 2.11, 2.13."""
    value = _gather(tensor, 0, group)  # type: ignore[arg-type]
    return value.wait() if isinstance(value, functional.AsyncCollectiveTensor) else value


def lower_right_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, grouped: bool
) -> torch.Tensor:
    """Causal attention of the last queries of a sequence: the last of them sees all keys. torch 2.11, 2.13.

    ``is_causal`` of ``scaled_dot_product_attention`` means the upper left corner. torch's own ``causal_lower_right``
    calls the kernel of FlashAttention where it can, for which it means the lower right; Dynamo cannot capture it.
    """
    length, all_keys = query.size(2), key.size(2)
    if length == all_keys:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    narrow = query.dtype in (torch.bfloat16, torch.float16) and query.size(3) % 8 == 0 and query.size(3) <= 256
    if query.device.type == "cuda" and narrow:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)[0]
    seen = torch.ones(length, all_keys, dtype=torch.bool, device=query.device).tril(all_keys - length)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=grouped)
