"""Compiling in other processes: what travels there, and Inductor's own."""

from __future__ import annotations

import contextlib
import copyreg
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard._compat.inductor import compile_cache, inductor_compile
from fxshard._compat.names import imported
from fxshard.log import LOG


def is_cached(segment: fx.GraphModule) -> bool:
    """Whether Inductor keeps in its cache what it makes of a graph. torch 2.11, 2.13."""
    from torch._inductor import config
    from torch._inductor.codecache import FxGraphCache

    if not config.fx_graph_cache or config.force_disable_caches:
        return False
    try:
        FxGraphCache._check_can_cache(segment)
    except Exception as error:  # of many kinds; whatever is wrong with a graph, compiling it here will tell
        LOG.debug("a segment is not kept in Inductor's cache: %s", error)
        return False
    return True


class _Torch:
    """Pickled as the module torch."""

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, ("torch",)


# Or pickle looks for such a value in all modules and names the first that has ``torch``, the script perhaps. Inductor's
# keys have that in them, and no two programs would have the same.
copyreg.pickle(
    torch.memory_format,
    lambda value: (getattr, (_Torch(), str(value).removeprefix("torch."))),  # type: ignore[arg-type]
)


OF_THE_SCRIPT = {
    "nn_module_stack",
    "source_fn_stack",
    "fwd_nn_module_stack",
    "fwd_source_fn_stack",
    "torch_fn",
    "from_node",
}
"""What nodes say about where they come from: it names classes that only the user's script has, and Inductor does not
read it. All else must travel: Inductor's cache does not look at it, and some of it decides what is compiled."""


@contextlib.contextmanager
def under(circumstances: Mapping[str, Any]) -> Iterator[None]:
    """Compile as the process would that is in such circumstances. torch 2.11, 2.13."""
    from torch._inductor import config

    _adopt(circumstances)
    with config.patch(circumstances["inductor"]):
        yield


def compile_any(circumstances: Mapping[str, Any]) -> None:
    """Compile a graph that nobody wants: the first one takes longest. torch 2.11, 2.13."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with under(circumstances):
        with FakeTensorMode(shape_env=ShapeEnv()):
            example = torch.empty(64, 64, device="cuda" if circumstances["device"] is not None else "cpu")
        inductor_compile(make_fx(_normalise)(example), [example])


def _normalise(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * torch.rsqrt((x * x).mean(-1, keepdim=True)),)


def compile_circumstances() -> dict[str, Any] | None:
    """What compilation depends on beside a graph, as far as a process can have it otherwise. torch 2.11, 2.13.

    None if another process cannot have it: passes or lowerings of the user's own, of which Inductor's cache does not
    know all.
    """
    from torch._inductor import config

    lowering = imported("torch._inductor.lowering")  # where it is not imported nobody has added to it
    lowerings = list(lowering.lowerings.values()) if lowering is not None else []
    modules = {(getattr(function, "__module__", None) or "").split(".")[0] for function in lowerings}
    foreign = modules - {"torch", ""} - sys.stdlib_module_names
    if foreign:
        LOG.debug("nothing can be compiled ahead: there are lowerings of %s", foreign)
        return None
    matmul = torch.backends.cuda.matmul
    circumstances = {
        "torch": str(torch.__version__),
        "inductor": config.save_config_portable(),
        "directories": {
            "TORCHINDUCTOR_CACHE_DIR": compile_cache(),
            **{name: os.environ[name] for name in ("TRITON_CACHE_DIR",) if name in os.environ},
        },
        "device": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "precision": _matmul_precision(),
        "fp32": matmul.fp32_precision,
        "fp16": matmul.allow_fp16_reduced_precision_reduction,
        "bf16": matmul.allow_bf16_reduced_precision_reduction,
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ),
    }
    try:
        pickle.dumps(circumstances)
    except Exception as error:  # of many kinds, as what options may be is
        LOG.debug("nothing can be compiled ahead under this configuration: %s", error)
        return None
    return circumstances


def _matmul_precision() -> str | None:
    """None where it was set by its newer name, after which the older one is an error. torch 2.11, 2.13."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _adopt(circumstances: Mapping[str, Any]) -> None:
    os.environ.update(circumstances["directories"])
    if circumstances["device"] is not None:
        torch.cuda.set_device(circumstances["device"])
    torch.set_num_threads(circumstances["threads"])
    torch.set_default_dtype(circumstances["dtype"])
    matmul = torch.backends.cuda.matmul
    if circumstances["precision"] not in (None, _matmul_precision()):  # setting what is there is not the same
        torch.set_float32_matmul_precision(circumstances["precision"])
    if circumstances["fp32"] != matmul.fp32_precision:
        matmul.fp32_precision = circumstances["fp32"]
    matmul.allow_fp16_reduced_precision_reduction = circumstances["fp16"]
    matmul.allow_bf16_reduced_precision_reduction = circumstances["bf16"]
    deterministic, warn_only, fill = circumstances["deterministic"]
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def start_kernel_processes() -> None:
    """Start the processes in which this one compiles GPU kernels, and wait for them. torch 2.11, 2.13."""
    from torch._inductor import async_compile

    if torch.cuda.device_count() > 0:
        async_compile.AsyncCompile.wait_pool_ready()


def stop_kernel_processes() -> None:
    """End them. torch 2.11, 2.13."""
    from torch._inductor import async_compile

    async_compile.shutdown_compile_workers()


def start_compile_processes() -> None:
    """Start the processes in which Inductor compiles GPU kernels, and wait for nothing.

    That takes seconds, in which kernels are compiled one after the other in this process; Inductor's own backend begins
    with it, and we call what is behind that backend. ``TORCH_WARM_POOL=0`` is respected. torch 2.11, 2.13.
    """
    from torch._inductor import async_compile

    async_compile.maybe_warm_pool()


def compile_processes() -> tuple[Sequence[Any], int]:
    """Where functions can be submitted to run in these processes, and how many there are. torch 2.11, 2.13.

    Nowhere, if there is no Triton or somebody does not want them.
    """
    from torch._inductor import async_compile

    return tuple(async_compile._pool_set), async_compile.get_compile_threads()


def kernel_cache(device: int) -> str:
    """Where Triton keeps compiled kernels of a device, once Inductor has compiled one. torch 2.11, 2.13."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return triton_cache_dir(device)


def import_what_kernels_import() -> None:
    """What the first lines of a kernel that Inductor wrote do, in the process that compiles it. torch 2.11, 2.13."""
    from torch._inductor.runtime import triton_helpers, triton_heuristics  # noqa: F401

    triton_helpers.set_driver_to_gpu()
