"""Hollow tensors: shape, strides and dtype, but no memory. It is what is left of a parameter that was sharded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard._torch import private
from fxshard._torch.errors import StateError

_TAKEN = (
    "this parameter belongs to a plain model that was given to fxshard.compile or fxshard.shard, which took its values"
    ": use the model that they returned, and its full_state_dict() for whole weights"
)


def hollow_like(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """A tensor that looks like another one and holds nothing; of a DTensor, what it wraps does not."""
    if isinstance(tensor, DTensor):
        local = hollow_like(private.wrapped(tensor), dtype, device)
        mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    hollow = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor.device)
    hollow.untyped_storage().resize_(0)
    private.forbid_writes(hollow)
    return hollow


def make_hollow(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Take the memory of a parameter that is sharded: it stays the object that it is."""
    if not isinstance(parameter, DTensor):
        parameter.data = hollow_like(parameter, dtype)
        return
    replacement = nn.Parameter(hollow_like(parameter, dtype), parameter.requires_grad)
    replacement.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, replacement)  # of a DTensor, ``data`` is only a part


def lend(parameter: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """Let a hollow parameter have memory, or be hollow again; returns what it had."""
    if isinstance(parameter, DTensor):
        before = private.wrapped(parameter)
        private.rewrap(parameter, values)
    else:
        before, parameter.data = parameter.data, values
    return before


def refuse_copies(parameter: torch.Tensor) -> None:
    """A parameter that was made hollow is neither copied nor pickled: there are no values."""
    parameter.__deepcopy__ = parameter.__reduce_ex__ = _refuse  # type: ignore[attr-defined,method-assign,assignment]


def _refuse(*args: Any) -> NoReturn:
    raise StateError(_TAKEN)


def is_hollow(value: object) -> bool:
    """Whether reading a tensor would read memory that is not there."""
    if isinstance(value, DTensor):
        value = private.wrapped(value)
    return (
        isinstance(value, torch.Tensor)
        and value.numel() > 0
        and not value.is_meta
        and value.layout is torch.strided  # sparse ones have several memories
        and not value.untyped_storage().nbytes()
    )


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory is; 0 for one that has none."""
    return 0 if is_hollow(tensor) else tensor.data_ptr()


def hooks_for_activations() -> AbstractContextManager[None]:
    """The hooks that are in force now, but for hollow parameters, which a graph only passes on to its backward."""
    hooks = private.saved_tensor_hooks()
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks

    def pack_activation(tensor: torch.Tensor) -> tuple[bool, Any]:
        return (True, tensor) if is_hollow(tensor) else (False, pack(tensor))

    def unpack_activation(packed: tuple[bool, Any]) -> torch.Tensor:
        hollow, value = packed
        return value if hollow else unpack(value)

    return torch.autograd.graph.saved_tensors_hooks(pack_activation, unpack_activation)
