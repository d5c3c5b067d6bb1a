"""Gradients that ``no_sync`` kept on this rank must be reduced before anything uses them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fxshard._torch.errors import StateError

if TYPE_CHECKING:
    from fxshard.runtime.bucket import Bucket

_BUCKET_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()
_hook: Any = None


def guard(parameter: torch.Tensor, bucket: Bucket) -> None:
    """From now on no optimizer steps over ``parameter`` while gradients of its bucket are unreduced."""
    global _hook
    _BUCKET_OF[parameter] = weakref.ref(bucket)
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)


def bucket_of(parameter: torch.Tensor) -> Bucket | None:
    """The bucket of a sharded parameter, as long as its model lives."""
    reference = _BUCKET_OF.get(parameter)
    return reference() if reference is not None else None


def buckets_of(optimizer: torch.optim.Optimizer) -> list[Bucket]:
    """The buckets of the sharded parameters that an optimizer updates, each once."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return list(dict.fromkeys(bucket for bucket in map(bucket_of, parameters) if bucket is not None))


def refuse_unreduced(buckets: Iterable[Bucket], what: str) -> None:
    """Raise if ``no_sync`` left gradients that no backward has reduced since."""
    names = [bucket.plan.name for bucket in buckets if bucket.kept is not None]
    if names:
        some = ", ".join(names[:3]) + ", …" * (len(names) > 3)
        raise StateError(
            f"{what}: gradients of {len(names)} buckets ({some}) were kept by no_sync() and never reduced; run the "
            "last backward outside of it, with a graph that uses these parameters, or drop them with model.zero_grad()"
        )


def refuse_discarded(buckets: Sequence[Bucket]) -> None:
    """Raise if there is no gradient, because what was called was ``torch.autograd.grad`` for inputs of the model."""
    if any(bucket.discarded for bucket in buckets) and not any(bucket.with_gradient for bucket in buckets):
        raise StateError(
            "optimizer.step(): no parameter has a gradient, and the last backward asked for those of inputs alone "
            "(torch.autograd.grad); call backward() on a loss. Pipeline schedules that compute gradients of inputs and "
            "of weights apart (zero bubble) do this: use GPipe, 1F1B, interleaved 1F1B or looped BFS"
        )


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    buckets = buckets_of(optimizer)
    refuse_unreduced(buckets, "optimizer.step()")
    refuse_discarded(buckets)
