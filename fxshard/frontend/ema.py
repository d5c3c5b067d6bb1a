"""``fxshard.EMA``: an exponential moving average of the weights, sharded as they are, swapped in for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxshard._torch import private
from fxshard._torch.errors import ConfigError, StateError
from fxshard.frontend.module import ShardedModule
from fxshard.planner.stored_names import in_our_layout
from fxshard.runtime.loaded_rows import with_rows


class EMA:
    """Averages of a sharded model's trained parameters, in the dtype of the masters: average ← decay·average +
    (1 − decay)·parameter, what ``torch.optim.swa_utils.get_ema_multi_avg_fn`` computes. Starts with the parameters as
    they are. Each rank keeps the rows that it holds of the parameters, and nothing travels.

    >>> ema = fxshard.EMA(model, decay=0.999)
    >>> model.optimizer.step()
    >>> ema.update()
    >>> with ema.swapped():
    ...     evaluate(model)
    """

    def __init__(self, model: ShardedModule, decay: float = 0.999) -> None:
        if not isinstance(model, ShardedModule):
            raise ConfigError(
                f"EMA: expected a model from fxshard.compile or fxshard.shard, got {type(model).__name__}"
            )
        if not 0 <= decay <= 1:
            raise ConfigError(f"EMA(decay={decay!r}): expected a number from 0 to 1")
        self.decay = decay
        self._model, self._swapped = model, False
        self._buckets = [bucket for bucket in model._sharding.buckets if bucket.plan.trainable]
        self._averages = [bucket.master.detach().clone() for bucket in self._buckets]

    @torch.no_grad()
    def update(self) -> None:
        """Count the parameters as they are now in; called after an optimizer's step."""
        self._not_swapped("update()")
        private.foreach_lerp_(self._averages, [bucket.master for bucket in self._buckets], 1 - self.decay)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model's parameters are the averages. Every rank enters it, and trains nothing in it."""
        self._not_swapped("swapped()")
        self._swap()
        self._swapped = True
        steps = [bucket.steps for bucket in self._buckets]
        try:
            yield
        finally:
            written = [bucket for bucket, then in zip(self._buckets, steps, strict=True) if bucket.steps != then]
            self._swapped = False
            self._swap()
        if written:
            raise StateError(
                f"{written[0].plan.params[0]} was written inside EMA.swapped(), by an optimizer or by loading: that "
                "went to the averages, and the parameters are what they were before it; train and load outside"
            )

    @torch.no_grad()
    def _swap(self) -> None:
        for bucket, average in zip(self._buckets, self._averages, strict=True):
            kept = bucket.master.clone()
            bucket.master.copy_(average)
            average.copy_(kept)
        self._model.parameters_changed()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's rows of the averages under the model's keys, for ``torch.distributed.checkpoint``."""
        self._not_swapped("state_dict()")
        return {
            name: bucket.as_state(bucket.flat_part(average, name), name)
            for bucket, average in zip(self._buckets, self._averages, strict=True)
            for name in bucket.plan.params
        }

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The model with averaged parameters, whole on every rank, on the CPU. A collective call."""
        with self.swapped():
            return self._model.full_state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take averages from whole tensors or from sharded ones; keys of other things, such as buffers, are left out.

        All of them, or none. Every rank calls it: what is sharded in another way is gathered.
        """
        self._not_swapped("load_state_dict()")
        own = self.state_dict()
        given = in_our_layout(own, state_dict)
        wrong = [name for name in own if name not in given or given[name].shape != own[name].shape]
        if wrong:
            raise StateError(
                f"EMA: missing, or of another shape: {', '.join(wrong[:5])}{' …' if wrong[5:] else ''}; nothing was "
                "loaded"
            )
        cut = {name: with_rows(own[name], given[name]) for name in own}
        for bucket, average in zip(self._buckets, self._averages, strict=True):
            for fragment in bucket.fragments:
                value, rows = cut[fragment.name], bucket.as_rows(average, fragment.name)
                if isinstance(value, DTensor):
                    rows.copy_(value.to_local())
                elif fragment.numel:
                    rows.copy_(bucket.rows(fragment.name, bucket.part(fragment.name, value)))

    def bytes_at_rest(self) -> int:
        """What this rank holds for the averages."""
        return sum(average.nbytes for average in self._averages)

    def _not_swapped(self, what: str) -> None:
        if self._swapped:
            raise StateError(f"EMA.{what} inside swapped(): the parameters are the averages there; leave it first")
