"""``fxshard.explain``: what becomes of a model's experts, without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from fxshard.frontend.capture import FAILURES, capture, explained
from fxshard.frontend.module import ShardedModule
from fxshard.frontend.tracing import outputs_without_values
from fxshard.kernels.report import ExpertsReport
from fxshard.passes.context import PassContext
from fxshard.passes.options import Options
from fxshard.passes.pipeline import before_autograd
from fxshard.schedule.events import Phase


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
        results = outputs_without_values(graph)
        return lambda *args: results

    plain = model._inner if isinstance(model, ShardedModule) else model
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    try:
        capture(plain, backend, dynamic=False)(*args, **kwargs)
    except FAILURES as error:
        raise explained(error, plain) from error
    return context.experts
