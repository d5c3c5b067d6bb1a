"""Optimizers over sharded parameters, ours and those of ``torch.optim``: what is refused, and what a step changes.

An update that treats every element by itself is right on the rows that a rank holds. One that looks at a matrix (Muon,
Adafactor) or at all parameters (LBFGS) computes something else on each rank, and waits for ranks that hold no rows: it
is refused when it is made. Before a step, gradients that ``no_sync`` kept on this rank must be reduced; after it,
shards have changed, and what is gathered from them is gathered again.

A tensor's version counts in-place operations, but fused optimizer kernels do not count. torch's hook that runs after
every optimizer's step closes the gap, for ours and for any other. Ours gather what they changed themselves where a
forward would start with it, in the middle of the step: after the step, those shards have not changed any more. Where
quantized copies of a shard are kept, too, the engine counts the change before that gather, which makes them anew.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fxshard._torch import private
from fxshard._torch.errors import ConfigError, StateError
from fxshard.runtime.loaded_rows import with_rows
from fxshard.runtime.uneven_rows import UnevenRows

if TYPE_CHECKING:
    from fxshard.runtime.bucket import Bucket

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.RMSprop,
)
FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Those whose fused kernels torch knows how to run on sharded tensors."""


NEED_WHOLE = frozenset({"Adafactor"})
"""Names of classes that others have, too (``TrainingArguments(optim="adafactor")``), and that look at matrices."""


class ShardedParameter(DTensor):
    """A parameter of which ranks hold different rows."""

    __slots__ = ()

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Of every parameter that it is given, an optimizer asks this first: it has no other hook for its making."""
        asked_by = sys._getframe(1).f_locals.get("self")
        if isinstance(asked_by, Optimizer):
            check(asked_by, asked_by.defaults)
        return super().is_leaf

    # Copies are parameters of nobody's; what is saved is a DTensor as torch makes it.
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = torch.nn.Parameter(private.as_dtensor(self), self.requires_grad)
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_cut"})
        return plain.__reduce_ex__(protocol)


class UnevenParameter(ShardedParameter, UnevenRows):
    """One of which ranks hold other numbers of rows than torch would give them."""


def mark(parameter: torch.Tensor) -> None:
    """From now on an optimizer that is made with ``parameter``, or steps over it, is checked."""
    parameter.__class__ = UnevenParameter if isinstance(parameter, UnevenRows) else ShardedParameter


def check(optimizer: Optimizer, options: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if torch's own class cannot update rows. Most classes of others are theirs to judge."""
    kind = type(optimizer)
    known = next(base for base in kind.__mro__ if base.__name__ in NEED_WHOLE or _is_torchs(base))
    if known is Optimizer:
        return
    if not issubclass(kind, ELEMENTWISE):
        name = f"{'torch.optim' if _is_torchs(known) else known.__module__}.{known.__name__}"
        raise ConfigError(
            f"{name} needs whole parameters, and each rank holds some of their rows: "
            f"use {_names(ELEMENTWISE)}, or optimizer=fxshard.Muon(...) for Muon; zero=0 keeps parameters whole"
        )
    if options.get("fused") and not issubclass(kind, FUSED):
        raise ConfigError(
            f"torch has no fused {kind.__name__} for sharded parameters (there is one of {_names(FUSED)}): leave out "
            "fused=True"
        )


def _is_torchs(kind: type) -> bool:
    return f"{kind.__module__}.".startswith("torch.optim.")


def _names(classes: tuple[type[Optimizer], ...]) -> str:
    return ", ".join(kind.__name__ for kind in classes)


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
    for group in optimizer.param_groups:
        if any(isinstance(parameter, ShardedParameter) for parameter in group["params"]):
            check(optimizer, group)
    _cut_loaded_state(optimizer)
    buckets = buckets_of(optimizer)
    refuse_unreduced(buckets, "optimizer.step()")
    refuse_discarded(buckets)


_CUT: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
"""Whether the state of an optimizer is cut as its parameters are: what it made itself is, what it loaded may not be."""


def _cut_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """State that was loaded as DTensors of torch's class is cut as parameters are: it does not know that its rows are
    uneven, or it is of a model that was sharded otherwise. Collective before the first step after loading, on every
    rank, whatever rows it was given; by itself a rank cannot tell whether others have what they need.
    """
    if getattr(optimizer, "gathers_ahead", False):
        return  # fxshard's own cut what they load, and may keep fewer rows than a parameter has
    known = _CUT.get(optimizer)
    if known is None:
        optimizer.register_load_state_dict_post_hook(_state_was_loaded)
    for parameter, state in optimizer.state.items():
        if known and not isinstance(parameter, UnevenRows):
            continue
        for field, value in state.items():
            if type(value) is DTensor and value.shape == parameter.shape:
                bucket = _BUCKET_OF.get(parameter, lambda: None)()
                if bucket is not None:
                    state[field] = _rows(bucket, bucket.name_of(parameter), with_rows(parameter, value))
    _CUT[optimizer] = True


def _state_was_loaded(optimizer: torch.optim.Optimizer) -> None:
    _CUT[optimizer] = False


def _rows(bucket: Bucket, name: str, given: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's rows of a whole tensor, as a sharded one."""
    if isinstance(given, DTensor):
        return given
    rows = bucket.rows(name, bucket.part(name, given))
    return bucket.wrap(rows.clone(memory_format=torch.contiguous_format).view(-1), name)


def _count_changes(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    gathers_ahead = getattr(optimizer, "gathers_ahead", False)
    buckets = buckets_of(optimizer)
    for bucket in buckets:
        bucket.steps += 1
    changed = [bucket.master for bucket in buckets if bucket.counts_steps or not gathers_ahead]
    if changed:
        torch.autograd.graph.increment_version(changed)
