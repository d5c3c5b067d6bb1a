"""One graph, several sets of parameters.

Dynamo treats the parameters of a module as inputs of its graph: code that was captured for one layer is called again
with the parameters of the next. A program, however, is tied to its parameters: their buckets, their places, their
schedule. So the inputs are looked at on every call, and each set of parameters gets a program of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxshard._torch import private
from fxshard.schedule.params import ParamRef

Refs = tuple[ParamRef | None, ...]
Compile = Callable[[Sequence[Any]], Callable[..., Any]]


class Variants:
    """What Dynamo calls in place of a compiled graph: chooses the program by the parameters that are passed."""

    def __init__(
        self,
        first: Callable[..., Any],
        refs: Refs,
        identify: Callable[[Any], ParamRef | None],
        compile: Compile,
        *,
        sizes_open: bool = False,
    ) -> None:
        self._first = first
        self._refs = refs
        self._identify = identify
        self._compile = compile
        self._sizes_open = sizes_open
        self._others: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        refs = tuple(map(self._identify, args))
        if refs == self._refs:
            return self._first(*args)
        # With open sizes every program takes what Dynamo's guards let through, as the first one does.
        kinds = () if self._sizes_open else tuple(map(_kind, args))
        key = (refs, torch.is_grad_enabled(), kinds)
        if key not in self._others:
            with private.no_observers():
                self._others[key] = self._compile(args)
        return self._others[key](*args)


def _kind(value: Any) -> Any:
    """What a program is specialised on that was compiled for the values of a call, and has no guards of Dynamo's."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.device, value.shape, value.stride(), value.requires_grad
