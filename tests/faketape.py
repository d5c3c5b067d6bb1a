"""A tape for the CPU: captures operations as a CUDA graph captures kernels, and repeats them on the same memory.

As on a GPU nothing that is recorded has run when recording ends, and captures share memory: each replay destroys what
other captures left in the pool, unless it was alive, and had to be, when this one was captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fxshard.runtime.cuda_tape import Place


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class _Recording(TorchDispatchMode):
    """Runs operations for their shapes, notes them, and undoes what they wrote to memory that is not the pool's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.own: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._keep(argument, value)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._keep(argument, kwargs[argument.name])
        given = {_storage(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and _storage(value) not in given:
                self.own.setdefault(_storage(value), value)
        self.calls.append((func, args, kwargs, result))
        return result

    def _keep(self, argument: Any, value: Any) -> None:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for written in tree_leaves(value):
                if _storage(written) not in self.own:
                    self._before.setdefault(_storage(written), (_bytes(written), _bytes(written).clone()))

    def undo(self) -> None:
        for memory, before in self._before.values():
            memory.copy_(before)


class FakeTape:
    """``protected``: memory that belongs to somebody for good, which no later capture gets."""

    device = torch.device("cpu")

    def __init__(self, protected: Callable[[], list[torch.Tensor]] = list) -> None:
        self._protected = protected
        self._pool: dict[int, torch.Tensor] = {}
        self.taken = False

    def busy(self) -> bool:
        return self.taken

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        spared = {_storage(tensor) for tensor in self._protected()}
        recording = _Recording()
        try:
            with recording:
                result = run()
        finally:
            recording.undo()
        arguments = [value for _, args, kwargs, _ in recording.calls for value in tree_leaves((args, kwargs))]
        read = {_storage(value) for value in arguments if isinstance(value, torch.Tensor)}
        self._pool.update(recording.own)
        calls = [
            (func, *tree_map_only(torch.Tensor, lambda t: self._noted(t, recording.own), (args, kwargs, results)))
            for func, args, kwargs, results in recording.calls
        ]
        spared |= recording.own.keys()

        def replay() -> None:
            self._destroy(spared | read)
            for func, args, kwargs, results in calls:
                for old, new in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and _storage(old) != _storage(new):
                        old.copy_(new)
            self._destroy(spared)

        return replay, result

    def delete(self) -> None:
        self._destroy({_storage(tensor) for tensor in self._protected()})
        self._pool.clear()

    def pool_bytes(self) -> tuple[int, int]:
        size = sum(tensor.untyped_storage().nbytes() for tensor in self._pool.values())
        return size, size

    def _noted(self, tensor: torch.Tensor, own: dict[int, torch.Tensor]) -> torch.Tensor:
        """What is not the capture's own is known by its address only, as to a kernel."""
        return tensor if _storage(tensor) in own or not tensor.numel() else self.tensor_at(Place.of(tensor))

    def _destroy(self, spared: set[int]) -> None:
        for address, tensor in self._pool.items():
            if address not in spared:
                _bytes(tensor).fill_(0xFF)

    def tensor_at(self, place: Place) -> torch.Tensor:
        memory = (ctypes.c_ubyte * place.bytes).from_address(place.address)
        return place.over(torch.frombuffer(memory, dtype=torch.uint8))
