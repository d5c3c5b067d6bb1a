"""Hooks for tensors that autograd saves (``save_on_cpu``, offloading) get activations, and no hollow parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fxshard._torch import private
from fxshard.runtime.hollow import is_hollow


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
