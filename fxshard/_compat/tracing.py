"""What traced graphs depend on beside a model, and the fake tensors in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fxshard._compat.inductor import known_decompositions, named_decompositions
from fxshard._compat.names import imported, is_own, own_directories
from fxshard._compat.processes import compile_circumstances

FakeDescription = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, str, bool, int]
"""Size, stride, offset, dtype, device, whether it wants a gradient, and the bytes of its memory."""


def current_fake_mode() -> Any:
    """The mode of the fake tensors of whoever traces now, or a new one. torch 2.11, 2.13."""
    from torch._guards import TracingContext
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return FakeTensorMode(shape_env=ShapeEnv())


def described_fake(value: torch.Tensor) -> FakeDescription | None:
    """A fake tensor in numbers, if nothing else is to be said of it. torch 2.11, 2.13."""
    from torch._subclasses import FakeTensor

    if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return None
    numbers = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    if not all(type(number) is int for number in numbers) or value.constant is not None:
        return None
    return (
        tuple(value.shape),
        tuple(value.stride()),
        numbers[-2],
        value.dtype,
        str(value.device),
        value.requires_grad,
        numbers[-1],
    )


def fake_tensors(described: Iterable[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Fake tensors from the number of their memory and their description. torch 2.11, 2.13."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    mode = current_fake_mode()
    convert = mode.fake_tensor_converter.from_meta_and_device
    storages: dict[int, Any] = {}
    made: list[torch.Tensor] = []
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        for storage, size, stride, offset, dtype, device, requires_grad, nbytes in described:
            if storage not in storages:
                storages[storage] = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
            plain = torch.empty(0, dtype=dtype, device="meta").set_(storages[storage], offset, size, stride)
            made.append(convert(mode, plain.requires_grad_(requires_grad), torch.device(device)))
    return made


def traced_under() -> dict[str, Any] | None:
    """What tracing a graph depends on beside it, as values; None where that cannot be said: hooks of the user's take
    part. Modes do, too, but Dynamo captures what they do. torch 2.11, 2.13.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    kinds = ("cpu", "cuda")
    return {
        "functorch": functorch.save_config_portable(),
        "dynamo": dynamo.save_config_portable(),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "attention": _attention_kernels(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.version(),
        ),
        "kernels": sorted(_kernels_in_python()),
        "decompositions": named_decompositions(),
        "devices": [_device(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else None,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
    }


def _attention_kernels() -> list[Any]:
    cuda = torch.backends.cuda
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        list(torch._C._get_sdp_priority_order()),
    ]


def _device(index: int) -> list[Any]:
    found = torch.cuda.get_device_properties(index)
    return [found.name, found.major, found.minor, found.multi_processor_count, found.total_memory]


def compiled_under() -> dict[str, Any] | None:
    """What compiling a graph depends on beside it and what is the same for as long as a process lives: all that is in
    Inductor's own key. None where functions of the user's take part, or somebody looks for what it was that changed.
    torch 2.11, 2.13.
    """
    from torch._inductor import config, config_comms
    from torch.compiler import config as compiler

    circumstances = compile_circumstances()
    bisector = imported("torch._inductor.compiler_bisector")
    bisected = bisector is not None and bisector.CompilerBisector.bisection_enabled
    common = imported("torch._inductor.codegen.common")
    others = common is not None and any(each is not None for each in common.custom_backend_codegen_configs.values())
    if circumstances is None or bisected or others or not all(is_own(each) for _, each in _given_passes()):
        return None
    del circumstances["directories"]
    return {
        **circumstances,
        "inductor": config.save_config_portable(ignore_private_configs=False),
        "collectives": config_comms.save_config_portable(ignore_private_configs=False),  # type: ignore[attr-defined]
        "passes": config._fuse_ddp_communication_passes,
        "provenance": config.trace.provenance_tracking_level,
        "tag": compiler.cache_key_tag,
    }


def foreign_code() -> str | None:
    """Something that takes part in tracing or compiling and is not torch's: a decomposition, a pattern, a pass, a
    kernel of the user's. None if there is none. torch 2.11, 2.13.
    """
    for what, function in (*_taking_part(), *_given_passes()):
        if not is_own(function):
            return f"{what} {function!r:.200}"
    return _foreign_kernel()


def _taking_part() -> Iterator[tuple[str, Any]]:
    """Functions that tracing may call. Modules that are not imported have what they will have: nobody has added to
    them.
    """
    from torch._functorch import aot_autograd, partitioners

    for decomposition in known_decompositions().values():
        yield "the decomposition", decomposition
    yield "in place of torch's,", partitioners.min_cut_rematerialization_partition
    yield "in place of torch's,", aot_autograd.aot_module_simplified
    joint_graph = imported("torch._inductor.fx_passes.joint_graph")
    if joint_graph is not None:
        yield "in place of torch's,", joint_graph.joint_graph_passes
        for listed in joint_graph.pass_patterns:
            for entries in list(listed.patterns.values()):
                for entry in entries:
                    for name in ("extra_check", "handler", "normalize_args", "replace_fn"):
                        yield f"a pattern's {name}", getattr(entry, name, None)


def _given_passes() -> Iterator[tuple[str, Any]]:
    """Passes that Inductor was given. What it says of its configuration leaves them out."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    common = imported("torch._inductor.codegen.common")
    if common is not None:
        for kind, custom in list(common.custom_backend_passes.items()):
            yield f"a pass for {kind}", custom
    for config, name in (
        (inductor, "joint_custom_pre_pass"),
        (inductor, "joint_custom_post_pass"),
        (inductor, "post_grad_custom_pre_pass"),
        (inductor, "post_grad_custom_post_pass"),
        (inductor, "_pre_fusion_custom_pass"),
        (inductor, "_fuse_ddp_communication_passes"),
        (functorch, "joint_custom_pass"),
    ):
        given = getattr(config, name, None)
        for each in given if isinstance(given, list | tuple) else [given]:
            yield name, each


def _kernels_in_python() -> list[str]:
    """Kernels for torch's operators that Python code has registered, by operator. torch 2.11, 2.13."""
    return [name for name in torch.library._impls.copy() if name.startswith(("aten/", "prims/"))]


def _foreign_kernel() -> str | None:
    """A kernel for one of torch's operators that a file of somebody else's has registered."""
    own, anybodys = own_directories(), str(torch.library.__file__)  # which registers what others ask it to
    for name in _kernels_in_python():
        namespace, _, rest = name.partition("/")
        operator = f"{namespace}::{rest.rpartition('/')[0]}"
        registered = torch._C._dispatch_dump(operator)
        for path in _REGISTERED_IN_PYTHON.findall(registered):
            if not path.startswith(own) or path == anybodys:
                return f"a kernel for {operator}, registered in {path}"
    return None


_REGISTERED_IN_PYTHON = re.compile(r"registered at (.*\.py|<.*>):\d+ ")
