"""Kernels compiled in other processes before they are wanted: Inductor's, which are idle while a model is traced.

What they compile is on disk when this process looks for it, at a first launch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch

from fxshard import _compat
from fxshard.log import LOG

Compile = Callable[[int], None]
"""Compiles a kernel for a GPU of a compute capability (90: 9.0), without one."""


def compile_elsewhere(compile: Compile, device: torch.device) -> None:
    """Call ``compile`` in one of the processes, if there are any, and wait for nothing.

    If it fails there, the launch that wants the kernel compiles it again, and says why it cannot.
    """
    pools, _ = _compat.compile_processes()
    for pool in pools:
        major, minor = torch.cuda.get_device_capability(device)
        cache = _compat.kernel_cache(torch.cuda.current_device() if device.index is None else device.index)
        pool.submit(_in_cache, cache, compile, 10 * major + minor).add_done_callback(_say)


def warm_up(device: torch.device) -> None:
    """Let each of the processes compile a first kernel, which takes longest."""
    pools, count = _compat.compile_processes()
    if pools:
        from fxshard.first_kernel import compile_first

        for number in range(count):
            compile_elsewhere(partial(compile_first, number), device)


def _in_cache(directory: str, compile: Compile, capability: int) -> None:
    os.environ["TRITON_CACHE_DIR"] = directory
    compile(capability)


def _say(done: Future[None]) -> None:
    error = done.exception() if not done.cancelled() else None
    if error is not None:
        LOG.debug("a kernel could not be compiled ahead of its launch: %s", error)
