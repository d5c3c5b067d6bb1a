"""``fxshard.explain``: what becomes of a model's experts, without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from fxshard.capture import FAILURES, capture, explained
from fxshard.config import Options
from fxshard.events import Phase
from fxshard.fused.report import ExpertsReport
from fxshard.module import ShardedModule
from fxshard.passes.context import PassContext
from fxshard.passes.pipeline import before_autograd


class _Explained(BaseException):
    """Thrown in place of running: everything that explaining needs has happened by then."""


def explain(
    model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], *, experts: str = "auto"
) -> ExpertsReport:
    """Which mixture-of-experts MLPs of a model are fused, by which implementation, and which are not, and why.

    Captures the model as ``fxshard.compile`` does and runs nothing. ``experts`` is the option of ``fxshard.compile``.

    >>> print(fxshard.explain(model, (tokens, targets)))
    layers.0.moe.experts and 3 more fused by torch: 8 experts, SwiGLU, gate and up separate
    """
    buckets = model._sharding.plans if isinstance(model, ShardedModule) else ()
    context = PassContext(buckets, Options(experts=experts), Phase.FORWARD)

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before_autograd(graph, context)

        def run(*args: Any) -> Any:
            raise _Explained

        return run

    plain = model._inner if isinstance(model, ShardedModule) else model
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    try:
        capture(plain, backend, dynamic=False)(*args, **kwargs)
    except _Explained:
        pass
    except FAILURES as error:
        raise explained(error, plain) from error
    return context.experts
