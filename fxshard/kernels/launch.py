"""Launches of Triton kernels without what Triton does at every call: going through all arguments to find out which of
the kernels that it has compiled they need.

Here the caller says so by a key, which must hold whatever the compiled kernel depends on: the device, the types of
arguments, whether addresses are multiples of 16, numbers (Triton compiles for their divisibility) and constants.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

try:
    from triton import __version__ as _TRITON
except ImportError:  # torch for the CPU comes without it, and nothing is launched
    _TRITON = ""

DIRECT = _TRITON.startswith("3.6.")
"""Whether compiled kernels are called directly. What they take is not the same in every version of Triton: in those
that this was not tried with, each launch is an ordinary one."""


_THERE = contextlib.nullcontext()
_MODE = threading.local()
_COMPILING = threading.Lock()
"""Held while a kernel is compiled, so that a first launch waits for a thread that is compiling it already."""


@contextlib.contextmanager
def only_compiling() -> Iterator[None]:
    """On this thread, launches compile and launch nothing. Tensors may be fake: Triton looks at their dtypes alone."""
    _MODE.only_compiling = True
    try:
        yield
    finally:
        _MODE.only_compiling = False


def aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins at a multiple of 16 bytes. Fake ones, which have no address, stand for such."""
    return getattr(_MODE, "only_compiling", False) or tensor.data_ptr() % 16 == 0


class Launches:
    """The launches of one kernel, which ``@triton.jit`` or ``@gluon.jit`` made."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel = kernel
        self._options = options
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        described: Callable[[tuple[Any, ...]], Iterable[Any]] = tuple,
    ) -> None:
        """Launch with all arguments, constants too, in their order. Triton compiles for what ``described`` returns."""
        compiled = self._compiled.get(key)
        only_compile = getattr(_MODE, "only_compiling", False)
        if compiled is not None:
            if not only_compile:
                compiled[grid](*args)
            return
        with _COMPILING:
            if only_compile:
                self._kernel.warmup(*described(tuple(map(_without_memory, args))), grid=grid, **self._options)
                return
            compiled = self._kernel[grid](*described(args), **self._options)
        if DIRECT:
            self._compiled[key] = compiled


def pointers(*tensors: torch.Tensor | None) -> Hashable:
    """What a kernel is compiled for of tensors whose addresses it is given."""
    return tuple([tensor is not None and (tensor.dtype, aligned(tensor)) for tensor in tensors])


def current(device: torch.device) -> AbstractContextManager[object]:
    """Launches inside go to ``device``. Entering ``torch.cuda.device`` takes as long as a launch: only where needed."""
    return _THERE if torch.cuda.current_device() == device.index else torch.cuda.device(device)


@cache
def processors(device: torch.device) -> int:
    """How many a GPU has: as many programs as a kernel needs that walks over all tiles itself."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Pointer:
    """A tensor's place among the arguments that Triton compiles for: an address that is a multiple of 16."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


def _without_memory(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return Pointer(arg.dtype)
    return type(arg)(*map(_without_memory, arg)) if hasattr(arg, "_fields") else arg
