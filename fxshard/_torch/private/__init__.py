"""Every private torch API that fxshard uses, each with the versions that were seen to have it."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fxshard._torch.private.aot import OTHER_TANGENT, Traced, before_backward, copied, graph_module, tangent_of, traced
from fxshard._torch.private.collectives import (
    collective_group,
    collective_name,
    fake_ranks,
    group_ranks,
    is_synchronous,
    is_wait,
    split_coalesced,
)
from fxshard._torch.private.dynamo import (
    collecting_in_checkpoints,
    graph_break,
    graph_input_example,
    input_name,
    leave_sizes_open,
    leaves_alone,
    module_path,
    open_floats,
    open_inputs,
    with_floats,
    without_logging,
)
from fxshard._torch.private.inductor import (
    activation_memory_budget,
    compile_clocks,
    draw_seeds_apart,
    inductor_compile,
    inductor_decompositions,
    inductor_joint_passes,
    start_compile_workers,
)
from fxshard._torch.private.nodes import (
    calls_checkpointed,
    chooses_attention,
    constant_identity,
    constants,
    draws_a_random_number,
    grouped_mm_offsets,
    is_mutable,
    is_random,
    operator_name,
    operator_of,
    returns_view,
    written_arguments,
)
from fxshard._torch.private.state_hooks import after_loading, before_loading, copy_state_hooks
from fxshard._torch.private.step import (
    StorageReference,
    UnevenDTensor,
    all_gather,
    as_dtensor,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    fused_adamw,
    is_strided,
    memory_of,
    reduce_scatter,
    same_memory,
    scaled_mm,
    shard_of_rows,
    share_memory,
)


def min_cut_partition(
    joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The partitioner that honours ``MUST_RECOMPUTE`` (``default_partition`` saves transposes). torch 2.11, 2.13.

    For random numbers that are drawn again it needs the mode of the graph's values, which it looks for around itself:
    a plan cuts its graph once more after the trace has ended.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import TracingContext, detect_fake_mode, tracing

    mode = detect_fake_mode([node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")])
    inside = contextlib.nullcontext() if TracingContext.try_get() is not None else tracing(TracingContext(mode))
    with lazy_graph_modules(), inside:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    return graph_module(forward, forward.graph), graph_module(backward, backward.graph)


def saved_outputs(saved: Sequence[fx.Node]) -> list[Any]:
    """What the partitioner says of forward's outputs that backward takes. torch 2.11, 2.13."""
    from torch._functorch._aot_autograd.descriptors import (
        SavedForBackwardsAOTOutput,
        SavedForBackwardsNoVcCheckAOTOutput,
    )

    unchecked = [bool(node.meta.get("saved_tensor_with_no_vc_check")) for node in saved]
    kinds = [SavedForBackwardsNoVcCheckAOTOutput if each else SavedForBackwardsAOTOutput for each in unchecked]
    return [kind(i) for i, kind in enumerate(kinds)]


def lazy_graph_modules() -> AbstractContextManager[None]:
    """Modules around graphs write their Python code when they are called, not each time their graph changes: those that
    torch makes, too. torch 2.11, 2.13.

    A quarter of what is left of planning, where no graph is ever called.
    """
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


def size_hint(size: int | torch.SymInt) -> int:
    """The value a symbolic size was traced with, without fixing it to that; 1 for one that depends on data.

    torch 2.11, 2.13.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if hint is not None else 1


def is_size(value: Any) -> bool:
    """Whether a node is a size (or another number) that is not known when graphs are compiled."""
    return isinstance(value, fx.Node) and isinstance(
        value.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool
    )


def size_name(size: int | torch.SymInt) -> int | str:
    """A size, or what it is computed as, without fixing it: comparing sizes would. torch 2.11, 2.13."""
    if isinstance(size, int):
        return size
    name = str(size)
    return int(name) if name.isdigit() else name  # one that a guard closed prints as its value


def free_symbols(value: Any) -> set[Any]:
    """The symbols in the sizes of a value. torch 2.11, 2.13."""
    from torch.fx.experimental.symbolic_shapes import free_symbols as found

    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        if all(type(size) is int for size in sizes):
            return set()  # torch looks at more, which takes longer
    return set(found(value)) if isinstance(value, torch.Tensor | torch.SymInt) else set()


def shape_environment(value: Any) -> Any:
    """What knows the symbols in the sizes of a value; None where there are none. torch 2.11, 2.13."""
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


def another_like(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor with sizes, strides, dtype and device of another fake one, but its own memory. torch 2.11, 2.13."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([value])
    with mode or contextlib.nullcontext():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@contextlib.contextmanager
def as_fake_as(value: torch.Tensor) -> Iterator[None]:
    """Compute with values of Dynamo's graph: what torch makes on the way is of their fake mode, which is not the one
    that Dynamo gives a backend. torch 2.11, 2.13."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), getattr(value, "fake_mode", None) or contextlib.nullcontext():
        yield


def fake_tensors() -> AbstractContextManager[Any]:
    """Tensors that are made here have no memory. torch 2.11, 2.13."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def is_plain(value: torch.Tensor | None) -> bool:
    """Whether a tensor, or what stands for it while tracing, is no subclass with operators of its own."""
    from torch._subclasses import FakeTensor

    return type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor)


class OperatorObserver(TorchDispatchMode):
    """A context that sees every operation outside compiled graphs before it runs. torch 2.11, 2.13.

    ``torch.compile`` goes on compiling beneath such a mode only if it says that it ignores what is compiled.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def before(self, operator: Any, args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        """Called ahead of an operation; what it returns is called with the operation's result."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        after = self.before(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if after is not None:
            after(result)
        return result


storage_address: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
"""Where the object lies that stands for a tensor's memory, also for a DTensor. torch 2.11, 2.13."""


def saved_tensor_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The innermost hooks for tensors that autograd saves, if there are any. torch 2.11, 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined,no-any-return]


def forbid_writes(tensor: torch.Tensor) -> None:
    """Operations that would write to the tensor's memory raise. torch 2.11, 2.13.

    Reads cannot be forbidden as well: where torch can be told to (``_set_storage_access_error_msg`` of builds for
    CUDA), it also refuses to say how large a tensor's storage is, which Dynamo asks.
    """
    torch._C._set_throw_on_mutable_data_ptr(tensor)  # type: ignore[attr-defined]


def backward_reaches(wanted: Callable[[torch.Tensor], bool]) -> bool:
    """Inside a backward function: whether the leaves that are ``wanted`` among its inputs get gradients.

    ``torch.autograd.grad`` of other tensors leaves them alone. True where there is no such leaf. torch 2.11, 2.13.
    """
    node = torch._C._current_autograd_node()
    for following, _ in node.next_functions if node is not None else ():
        leaf = getattr(following, "variable", None)
        if following is not None and leaf is not None and wanted(leaf):
            return torch._C._will_engine_execute_node(following)
    return True


def flattened(mesh: dist.DeviceMesh, dimensions: tuple[str, ...], inner: str) -> dist.DeviceMesh:
    """Dimensions of a mesh, the last of them together with ``inner`` as one. torch 2.11, 2.13."""
    *outer, last = dimensions
    flat = mesh[last, inner]._flatten(f"{last}_{inner}")
    return joined_meshes(mesh[tuple(outer)], flat) if outer else flat


def after_backward(call: Callable[[], None]) -> None:
    """Call something when the backward that runs now is over, on the thread that started it. torch 2.11, 2.13."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def call_unbroken(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call while Dynamo traces: a graph break in there, the first thing or later, is an error. torch 2.11, 2.13."""
    with torch._dynamo.error_on_graph_break(True):
        return call(*args, **kwargs)


def inside_ddp() -> bool:
    """Whether a ``DistributedDataParallel`` is running its forward, which Dynamo may be tracing. torch 2.11, 2.13."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def group_timeout(group: dist.ProcessGroup | None = None) -> datetime.timedelta:
    """How long a collective of the group (by default, of the world) may take. torch 2.11, 2.13."""
    group = group or dist.group.WORLD
    assert group is not None
    device = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    return group._get_backend(torch.device(device)).options._timeout


def default_store() -> dist.Store:
    """The store that the processes of the world found each other with. torch 2.11, 2.13."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def local_version(tensor: torch.Tensor) -> int:
    """The version of the rows that a DTensor wraps; 0 for a plain tensor. torch 2.11, 2.13."""
    local = getattr(tensor, "_local_tensor", None)
    return 0 if local is None else local._version


PLAIN_RESULTS: Any = torch._C._disabled_torch_function_impl
"""A tensor subclass with this as ``__torch_function__`` gives plain tensors, at no cost. torch 2.11, 2.13."""


def plain_attributes() -> AbstractContextManager[None]:
    """Attributes of tensors are read without asking the ``__torch_function__`` of subclasses, in a sixth of the time.
    torch 2.11, 2.13."""
    return torch._C.DisableTorchFunctionSubclass()


def wrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The very tensor that a DTensor wraps, not a view of it. torch 2.11, 2.13."""
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


def rewrap(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Let a DTensor wrap another tensor of the same shape. torch 2.11, 2.13."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a parameter: the tensor that a DTensor wraps, differentiated as it is. torch 2.11, 2.13."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def joined_meshes(data: dist.DeviceMesh, tensor: dist.DeviceMesh) -> dist.DeviceMesh:
    """The dimensions of two parts of a mesh, side by side, as FSDP2 does; ``RuntimeError`` if they are parts of
    different meshes, or have ranks in common. torch 2.11, 2.13."""
    return dist.DeviceMesh._concatenate([data, tensor])


def real_mesh(value: Any) -> dist.DeviceMesh:
    """The mesh of a DTensor; that of a fake one may be fake, too. torch 2.11, 2.13."""
    mesh = value.device_mesh
    return getattr(mesh, "real_obj", mesh)


def is_plain_shard(placement: Any) -> bool:
    """Whether a placement cuts a dimension into consecutive parts. torch 2.11, 2.13."""
    return type(placement) is Shard


def profiling() -> bool:
    """Whether a profiler runs (``emit_nvtx`` is one): ranges cost something. torch 2.11, 2.13."""
    return torch.autograd._profiler_enabled()


def no_observers() -> AbstractContextManager[Any]:
    """Run without the dispatch modes that are active. torch 2.11, 2.13."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def capture_failures() -> tuple[type[BaseException], ...]:
    """What Dynamo raises when it cannot capture a function as one graph. torch 2.11, 2.13."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (TorchDynamoException, FailOnRecompileLimitHit, GuardOnDataDependentSymNode)


def onednn_supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of bf16 or fp16 on this CPU. torch 2.11, 2.13.

    Also where torch has no oneDNN: then nothing is known of what its products are like.
    """
    if not torch.backends.mkldnn.is_available():
        return True
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return bool(supported[dtype]())


def is_recompile_limit(error: BaseException) -> bool:
    """Whether Dynamo captured a function as often as it may, and would have to once more. torch 2.11, 2.13."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


@contextlib.contextmanager
def as_a_compiler() -> Iterator[None]:
    """Run as AOTAutograd runs a compiler, whatever the user has entered around a model. torch 2.11, 2.13."""
    with (
        no_observers(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C._DisableAutocast(),
    ):
        yield


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use, None where it finds none. torch 2.11, 2.13."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return get_cpp_compiler()
    except RuntimeError:  # InvalidCxxCompiler
        return None
