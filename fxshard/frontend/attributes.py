"""What is asked of a sharded model as of the one that it was made from: attributes, and what modules do otherwise.

Data of the plain model is read and set there; methods run on it. What cannot be done with parameters that are spread
over ranks is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import nn

from fxshard._torch.errors import StateError
from fxshard.frontend import likeness
from fxshard.frontend.mirror import refuse_moves


class LikePlain(nn.Module):
    """A module that stands for ``_inner``."""

    _inner: nn.Module

    def __getattr__(self, name: str) -> Any:
        """Sharded parameters, buffers and submodules; then data of the plain model, and methods, which run on it."""
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__.get(kind, ()):
                return self.__dict__[kind][name]
        own = getattr(type(self), name, None)
        if isinstance(own, property):  # without a value now: its error says why
            return own.__get__(self)
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = likeness.attribute(self, inner, name)
        return likeness.method(self, value) if likeness.is_method(value, inner) else value  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        """Data of the plain model is set there, where forward reads it."""
        inner = self.__dict__.get("_inner")
        if inner is None or name in self.__dict__ or (hasattr(type(self), name) and name not in inner.__dict__):
            super().__setattr__(name, value)
        elif hasattr(type(self), name) and name != "training":
            raise StateError(
                f"{name!r} of {type(inner).__name__} cannot be set any more: sharded models have something else of "
                "that name. Set it on the plain model, before fxshard.compile, or call it otherwise"
            )
        elif isinstance(value, nn.Module | nn.Parameter) or name in inner._modules or name in inner._parameters:
            raise StateError(
                f"{name!r} cannot be replaced in a sharded model: replace it in the plain model, before fxshard.compile"
            )
        else:
            setattr(inner, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in self._parameters or name in self._modules:
            super().__delattr__(name)
        else:
            delattr(self._inner, name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """``to()``, ``cuda()``, ``float()`` and the like: accepted where they change nothing."""
        refuse_moves(self, fn)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "a sharded model cannot be copied or pickled, its parameters are spread over ranks: take "
            "full_state_dict(), or fxshard.save for a checkpoint; fxshard.EMA(model) averages its weights"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """What ``DistributedDataParallel`` asks for when it is made, ahead of its collectives."""
        raise StateError(
            "DistributedDataParallel(model): a sharded model reduces its gradients itself, and its ranks hold "
            "different rows, which DDP would overwrite; use the model as it is. For a Trainer or Accelerate: "
            "fxshard.integrations"
        )

    def _get_name(self) -> str:
        return type(self._inner).__name__  # trainers look a model up by it
