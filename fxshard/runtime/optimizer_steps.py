"""What a step of any optimizer means for buckets: before it, gradients that ``no_sync`` kept on this rank must be
reduced; after it, shards have changed, and what is gathered from them is gathered again.

A tensor's version counts in-place operations, but fused optimizer kernels do not count. torch's hook that runs after
every optimizer's step closes the gap, for ours and for any other. Ours gather what they changed themselves where a
forward would start with it, in the middle of the step: after the step, those shards have not changed any more. Where
quantized copies of a shard are kept, too, the engine counts the change before that gather, which makes them anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fxshard._torch.errors import StateError

if TYPE_CHECKING:
    from fxshard.runtime.bucket import Bucket

_BUCKET_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()
_hooks: list[Any] = []


def guard(parameter: torch.Tensor, bucket: Bucket) -> None:
    """From now on no optimizer steps over ``parameter`` while gradients of its bucket are unreduced, and a step over it
    counts as a change of the shard."""
    _BUCKET_OF[parameter] = weakref.ref(bucket)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_count_changes))


def buckets_of(optimizer: torch.optim.Optimizer) -> list[Bucket]:
    """The buckets of the sharded parameters that an optimizer updates, each once, as long as their models live."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    found = (_BUCKET_OF.get(parameter, lambda: None)() for parameter in parameters)
    return list(dict.fromkeys(bucket for bucket in found if bucket is not None))


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


def _count_changes(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    gathers_ahead = getattr(optimizer, "gathers_ahead", False)
    changed = [bucket.master for bucket in buckets_of(optimizer) if bucket.counts_steps or not gathers_ahead]
    if changed:
        torch.autograd.graph.increment_version(changed)
