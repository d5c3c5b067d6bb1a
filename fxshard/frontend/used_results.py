"""Which results of forward a loss was computed from: told to the backward program ahead of its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxshard._torch import private
from fxshard.runtime.program import Program


def tell_unused_results(run: Callable[..., Any], backward: Program) -> Callable[..., Any]:
    """``run`` as it is, but ``backward`` learns which results of it have no gradient."""

    def tell(missing: frozenset[int]) -> None:
        backward.without_loss = missing

    def call(*args: Any) -> Any:
        results = run(*args)
        private.before_backward(results, tell)
        return results

    return call
