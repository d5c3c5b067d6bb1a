"""Kernels compiled in other processes before they are wanted.

What they compile is on disk when this process looks for it, at a first launch. The processes are a crew of ours
(:mod:`fxshard.helpers`), as long as it is there, and Inductor's otherwise, which are idle while a model is traced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial

import torch

from fxshard import _compat
from fxshard.first_product import load_libraries
from fxshard.helpers import beside, crew
from fxshard.helpers.known import has_run
from fxshard.log import LOG

Compile = Callable[[int], None]
"""Compiles a kernel for a GPU of a compute capability (90: 9.0), without one."""


def start() -> None:
    """Start the processes that will compile beside this one, and wait for none of them.

    A program that has run before finds what it compiles in Inductor's cache, and needs none. Inductor starts its own
    when it has read its cache, to be sure; meanwhile they would be in the way.
    """
    # is_available() would initialise CUDA: no process forked later could use it
    gpus = torch.cuda.is_initialized() or torch.cuda.device_count() > 0
    allowed = (gpus and os.environ.get("TORCH_WARM_POOL", "1") == "1") or crew.VARIABLE in os.environ
    new = not has_run()
    if allowed and new:
        crew.hire(torch.cuda.current_device() if torch.cuda.is_initialized() else None)
    if gpus and new:
        _compat.start_compile_processes()
    if gpus:
        beside.begin("hash Triton", _compat.triton_hasher())  # which looking into its cache begins with, and Inductor's


def compile_elsewhere(compile: Compile, device: torch.device) -> None:
    """Call ``compile`` in one of the processes, if there are any, and wait for nothing.

    If it fails there, the launch that wants the kernel compiles it again, and says why it cannot.
    """
    helpers, (pools, _) = crew.hired(), _compat.compile_processes()
    if helpers is None and not pools:
        return
    major, minor = torch.cuda.get_device_capability(device)
    cache = _compat.kernel_cache(torch.cuda.current_device() if device.index is None else device.index)
    if helpers is not None:
        helpers.publish(partial(_in_cache, cache, compile, 10 * major + minor), queue=crew.KERNELS)
        return
    for pool in pools:
        pool.submit(_in_cache, cache, compile, 10 * major + minor).add_done_callback(_say)


def warm_up(device: torch.device, dtypes: Collection[torch.dtype]) -> None:
    """Let each of the processes compile something, and this one multiply something: the first takes longest."""
    for dtype in dtypes:
        beside.begin(f"load libraries for {dtype}", partial(load_libraries, device, dtype), torch=True)
    helpers, (pools, count) = crew.hired(), _compat.compile_processes()
    if helpers is not None:
        circumstances = _compat.compile_circumstances()
        if circumstances is not None:
            for _ in range(helpers.count):
                helpers.publish(partial(_compat.compile_any, circumstances), wanted=False)
    elif pools:
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
