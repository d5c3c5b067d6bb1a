"""Capturing a model with repeated layers through its twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from fxshard import _compat
from fxshard.capture import FAILURES, capture
from fxshard.log import LOG
from fxshard.repetition.refill import NotAlike
from fxshard.repetition.stand_ins import forget
from fxshard.repetition.twins import Twins

if TYPE_CHECKING:
    from fxshard.backend import Backend


def capture_briefly(model: nn.Module, backend: Backend, *, dynamic: bool | None = None) -> Callable[..., Any]:
    """``model`` under ``torch.compile`` as one graph, of whose repeated layers Dynamo traces one of each kind."""
    twins = Twins(model) if _compat.inlines_modules() else None
    whole = capture(model, backend, dynamic=dynamic)
    if twins is None or not twins.followers:
        return whole
    backend.twins = twins
    return _Brief(twins, capture(twins.model, backend, dynamic=dynamic), whole)


class _Brief:
    """Calls a model's twin while that will do, and then the model."""

    def __init__(self, twins: Twins, brief: Callable[..., Any], whole: Callable[..., Any]) -> None:
        self._twins: Twins | None = twins
        self._brief, self._whole = brief, whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._twins is not None and self._twins.keep_up():
            try:
                return self._brief(*args, **kwargs)
            except FAILURES as error:
                if not _may_be_the_twins(error):
                    raise
                LOG.debug("every layer is traced: %s", error)
                forget(self._twins.token)
        self._twins = None
        return self._whole(*args, **kwargs)


def _may_be_the_twins(error: BaseException) -> bool:
    """Whether a failure is of layers that are not alike, or of Dynamo, which may trace the model where it could not
    trace its twin; not of what happens to the graph afterwards.
    """
    inner = getattr(error, "inner_exception", None)  # what a backend has raised
    return inner is None or isinstance(inner, NotAlike)
