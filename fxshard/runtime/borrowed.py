"""Weights for code that is not compiled: methods of the model other than ``forward``, ``generate`` above all.

While such code runs, hollow parameters get memory with the gathered weights; afterwards they are hollow again. Nothing
that training uses is touched: not the shards, not the arena, not a random state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.runtime.engine import Engine
from fxshard.runtime.hollow import lend

Place = tuple[int, int]
"""A parameter as (bucket, position in it)."""


class BorrowedWeights:
    """Buckets gathered outside programs, in the compute dtype, and given back together."""

    def __init__(self, engine: Engine, hollow: dict[Place, nn.Parameter]) -> None:
        self._engine, self._hollow = engine, hollow
        self._before: dict[Place, tuple[torch.Tensor, int]] = {}
        """What parameters were, and their versions when they got memory."""

    def gather(self, index: int) -> None:
        """Give the parameters of a bucket memory. Collective."""
        if (index, 0) in self._before:
            return
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode has no version
            views = self._engine.unsharded(index)
        for position, view in enumerate(views):
            parameter = self._hollow[index, position]
            before = lend(parameter, view)
            self._before[index, position] = (before, parameter._version)

    def give_back(self) -> list[str]:
        """Make the parameters hollow again; returns the names of those that were written to."""
        written = [place for place, (_, version) in self._before.items() if self._hollow[place]._version != version]
        for place, (before, _) in self._before.items():
            lend(self._hollow[place], before)
        self._before = {}
        return [self._engine.buckets[index].plan.params[position] for index, position in written]


@contextmanager
def borrowed(engine: Engine, hollow: dict[Place, nn.Parameter], method: str, *, all_at_once: bool) -> Iterator[None]:
    """Weights for ``method``: ``all_at_once`` before it begins, or a bucket when a parameter of it is first used.

    Gathering is collective: all ranks call the method. Without a use of weights there is none.
    """
    weights = BorrowedWeights(engine, hollow)
    try:
        with lent(engine, {}):
            for index in range(len(engine.buckets)) if all_at_once else ():
                weights.gather(index)
            with nullcontext() if all_at_once else _FirstUses(weights, hollow, method):
                yield
    finally:
        written = weights.give_back()
    if written:
        raise StateError(
            f"{method}() wrote to {', '.join(written[:3])}, but what it had were gathered parameters, and "
            "shards do not follow: load weights again, and call it on the plain model, before fxshard.compile"
        )


@contextmanager
def lent(engine: Engine, values: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Whole ``values`` for hollow parameters, for code on one rank that computes with them. Nothing is gathered.

    Modules say the keys of their state dicts meanwhile, of other parameters, too.
    """
    before, engine.lends = engine.lends, True
    hollow = [(parameter, lend(parameter, value)) for parameter, value in values.items()]
    try:
        yield
    finally:
        engine.lends = before
        for parameter, value in hollow:
            lend(parameter, value)


class _FirstUses(private.OperatorObserver):
    """Gathers the bucket of each parameter that an operation is about to read."""

    def __init__(self, weights: BorrowedWeights, hollow: dict[Place, nn.Parameter], method: str) -> None:
        super().__init__()
        self._weights, self._method = weights, method
        self._place = {id(parameter): place for place, parameter in hollow.items()}

    def before(self, operator: Any, args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        for value in tree_leaves((args, kwargs)):
            place = self._place.get(id(value)) if isinstance(value, nn.Parameter) else None
            if place is None:
                continue
            if torch.is_grad_enabled() and value.requires_grad:
                raise StateError(
                    f"{self._method}() computes with parameters while gradients are recorded, and only forward is "
                    "compiled: train through model(...), or call it below torch.no_grad()"
                )
            self._weights.gather(place[0])
        return None
