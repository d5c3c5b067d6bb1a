"""The memory of tensors: whose it is, and how long it lives."""

from __future__ import annotations

from typing import Any

import torch


class StorageReference:
    """A weak reference to the storage of a tensor: it lives as long as any view of it. torch 2.11, 2.13."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._reference: Any = StorageWeakRef(tensor.untyped_storage())

    def expired(self) -> bool:
        return bool(self._reference.expired())

    def is_of(self, tensor: torch.Tensor) -> bool:
        return bool(self._reference.cdata == memory_of(tensor))


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same bytes with a storage of its own, which keeps the first one's alive. torch 2.11, 2.13."""
    from torch.utils.dlpack import from_dlpack, to_dlpack

    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # DLPack does not know every small type
    # A capsule, and no stream: there is nothing to wait for.
    return from_dlpack(to_dlpack(raw)).view(tensor.dtype)


def memory_of(value: torch.Tensor) -> int:
    """The same number for tensors that share memory, also for fake ones, which have none. torch 2.11, 2.13."""
    return value.untyped_storage()._cdata


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one tensor is a view of the other, or both of a third; fake tensors too. torch 2.11, 2.13."""
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]
