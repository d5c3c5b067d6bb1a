"""Memory of the host that a GPU copies to and from while it computes."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch

from fxshard._torch.errors import StateError


def host_memory(size: int, device: torch.device, asked_by: str, instead: str) -> torch.Tensor:
    """Zeros in the host's memory; where the device is a GPU, in pages that stay where they are.

    Registered and not allocated by torch, which rounds such allocations up to powers of two.
    """
    memory = torch.zeros(size, dtype=torch.uint8)
    if device.type == "cuda" and size:
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)):
            raise StateError(
                f"{asked_by}: {size / 2**30:.1f} GiB of host memory could not be pinned; leave more of it free, or "
                f"{instead}"
            )
        weakref.finalize(memory, _unpin, runtime, memory.data_ptr(), device).atexit = False
    return memory


def untouched_memory(size: int) -> torch.Tensor:
    """Zeros in the host's memory that take none of it until they are written to; ``torch.zeros`` writes them."""
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size]


def _unpin(runtime: Any, address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    runtime.cudaHostUnregister(address)
