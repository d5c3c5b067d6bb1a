"""Capturing a model with ``torch.compile``, and saying in our words why it failed."""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from fxshard._torch import private
from fxshard._torch.errors import CaptureError, ConfigError, FxshardError, StateError
from fxshard._torch.private.attention import context_parallel_device
from fxshard.frontend.layerdrop import NoneBelowZero, has_layerdrop
from fxshard.frontend.output_hooks import collects_outputs, install_output_hooks
from fxshard.frontend.transformers_calls import Calls


def capture(
    model: nn.Module,
    backend: Callable[..., Any],
    *,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    calls: Calls | None = None,
) -> Callable[..., Any]:
    """``model`` under ``torch.compile`` with a backend of its own.

    Dynamo counts recompilations per code object, and two models of one class share their forward's. Each capture
    therefore calls the model through code of its own: the ninth model of a class compiles like the first. Calls of
    loggers in ``forward`` are left out of the graph; ``transformers`` has them in many models.

    With ``dynamic=True`` torch leaves open all numbers that forward reads, the ``eps`` of each norm among them: each
    layer then takes numbers of its own, and none is folded. Where there is one graph, the sizes of what it is given are
    left open in place of that, and numbers when they change, as without ``dynamic``. So are sizes with
    ``dynamic=None`` where ``calls`` begin with a padded batch: the next one will be padded to another length.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    def call_with_layerdrop(*args: Any, **kwargs: Any) -> Any:
        with NoneBelowZero():
            return model(*args, **kwargs)

    call = call_with_layerdrop if has_layerdrop(model) else call
    code = call.__code__.replace(co_name=f"{type(model).__name__}_{id(backend):x}")
    own = types.FunctionType(code, call.__globals__, call.__name__, call.__defaults__, call.__closure__)
    open_sizes = bool(dynamic) and fullgraph
    padded_calls = calls if dynamic is None and fullgraph else None
    compiled = torch.compile(
        own, backend=_weakly(backend), fullgraph=fullgraph, dynamic=None if open_sizes else dynamic
    )

    make_traceable(model)
    collecting = private.collecting_in_checkpoints if collects_outputs(model) else contextlib.nullcontext

    def run(*args: Any, **kwargs: Any) -> Any:
        refuse_context_parallel()
        if open_sizes or (padded_calls is not None and padded_calls.padded):
            private.leave_sizes_open((args, kwargs))
        # Not around torch.compile: a graph is captured when its first input comes.
        with private.without_logging(), collecting():
            return compiled(*args, **kwargs)

    return run


def make_traceable(model: nn.Module) -> None:
    """Have modules of other libraries do ahead, or otherwise, what Dynamo cannot trace in their forward. In place."""
    install_output_hooks(model)
    if "peft.tuners.lora" in sys.modules:
        from fxshard.frontend.adapted_parameters import adapt_in_forward  # which imports peft

        adapt_in_forward(model)


def refuse_context_parallel() -> None:
    """An error inside the block of torch's ``context_parallel`` on a CPU.

    It replaces ``scaled_dot_product_attention`` by a function that wraps arguments in DTensors, for which torch has
    ring attention around three CUDA kernels, and none on a CPU: Dynamo cannot capture it there. Asked for at each call,
    so that nothing depends on whether torch notices that a graph was captured outside of the block.
    """
    if context_parallel_device() == "cpu":
        raise ConfigError(
            "the model was called inside torch's context_parallel() with a mesh of CPUs; torch has ring attention for "
            "CUDA alone. Leave the block out: cut sequences with "
            "fxshard.integrations.context_parallel.ContextParallel(mesh).shard(...), which cuts them as "
            "context_parallel does, and call its attention() in the model"
        )


def _weakly(backend: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that keeps nothing alive: Dynamo never frees a backend, and ours has a model's shards."""
    reference = weakref.ref(backend)

    def compile_for(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        living = reference()
        if living is None:
            raise StateError("the model that this graph belongs to does not exist any more; compile a new one")
        return living(graph, example_inputs)

    return compile_for


def explained(error: BaseException, model: nn.Module, captured: Sequence[str] = ()) -> FxshardError:
    """Our own error inside one of Dynamo's, or Dynamo's with what to do about it.

    ``captured``: the shapes that each graph takes that was compiled before.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, FxshardError):
        cause = cause.__cause__ or getattr(cause, "inner_exception", None)
    if cause is None and private.is_recompile_limit(error):
        graphs = "\n".join(f"  graph {i} takes {shapes}" for i, shapes in enumerate(captured, 1))
        return CaptureError(
            f"{type(model).__name__}.forward was compiled {len(captured)} times, as often as torch allows, and needs "
            f"yet another graph:\n{graphs}\n"
            "Where sizes change, leave dynamic=None, which leaves them open after the first change, or pad batches to "
            "a few lengths; where something else does (TORCH_LOGS=recompiles says what), give it to forward as a "
            "tensor, or raise torch._dynamo.config.recompile_limit."
        )
    return cause or CaptureError(
        f"torch.compile could not capture {type(model).__name__}.forward as one graph:\n{error}\n"
        "Move what cannot be traced (printing, .item(), data-dependent Python) out of forward, or allow several graphs "
        "with fxshard.compile(..., fullgraph=False)."
    )


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of a tree in another dtype, everything else as it is."""
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


FAILURES = private.capture_failures()


_HOOKS = ("enable_input_require_grads.<locals>.", "make_inputs_require_grad")
"""Parts of their qualified names: the method of ``transformers``, and functions inside some of peft's."""


def drop_input_gradient_hooks(model: nn.Module) -> None:
    """Remove hooks that make the output of an embedding require a gradient, as ``transformers`` and peft register them.

    Where adapters are trained on frozen weights, no input of a checkpointed layer requires a gradient, and reentrant
    checkpointing (``use_reentrant=True``) then computes none for what is inside. A compiled graph is not reentrant:
    what requires a gradient is known from its parameters, so the hook changes no result. But it calls
    ``requires_grad_()`` on a tensor in the middle of the graph, which Dynamo cannot trace. Handles that the model keeps
    for them do no harm: removing a hook twice is nothing. Attention of T5 and its kin, told that it is checkpointed,
    does the same with zeros, and nothing else.
    """
    for module in model.modules():
        if "has_relative_attention_bias" in module.__dict__:
            module.__dict__["gradient_checkpointing"] = False
        for key, hook in list(module._forward_hooks.items()):
            name, home = getattr(hook, "__qualname__", ""), getattr(hook, "__module__", "") or ""
            if home.split(".")[0] in ("transformers", "peft") and any(part in name for part in _HOOKS):
                del module._forward_hooks[key]
