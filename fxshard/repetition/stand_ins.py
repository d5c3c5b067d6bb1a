"""What stands in a model's twin for layers: nodes that say where a traced layer begins and ends, and where another one,
which is not traced, would have been.

Dynamo calls these functions with fake tensors, and never what they are in the graph: that is rewritten before anybody
runs it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxshard import _compat
from fxshard.repetition.gap import Jump

Path = tuple[str, ...]

TENSOR = ("tensor",)
"""Stands for each tensor in what is said of a call; a tuple would be ``("tuple", ...)``."""

_RESULTS: dict[tuple[int, Path], Any] = {}
"""What layers returned, by the token of their twin and their path: tensors without memory."""


@_compat.opaque
def enter(token: int, path: Path, said: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A traced layer is called: ``said`` is all but the tensors."""
    return tensors


@_compat.opaque
def leave(token: int, path: Path, result: Any) -> Any:
    """A traced layer returns."""
    _RESULTS[token, path] = result
    return result


@_compat.opaque
def pass_by(token: int, path: Path, leader: Path, said: Any, *tensors: torch.Tensor) -> Any:
    """A layer is called that is not traced; it returns something like what its leader returned."""
    result = _RESULTS[token, leader]
    like = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    made = iter(Jump.apply([_kind(leaf) for leaf in like], [leaf.requires_grad for leaf in like], *tensors))
    return tree_map_only(torch.Tensor, lambda _: next(made), result)


def forget(token: int) -> None:
    """The graph has been captured: what layers returned is not asked for any more."""
    for key in [key for key in _RESULTS if key[0] == token]:
        del _RESULTS[key]


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype, value.device


def stand_in(token: int, path: Path, leader: Path) -> dict[str, Any]:
    """The attributes of a layer that is not traced."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        said = _tell_call(args, kwargs, tensors)
        return pass_by(token, path, leader, said, *tensors)

    return {"forward": forward}


def marked(token: int, path: Path) -> dict[str, Any]:
    """The attributes of a layer that others follow: hooks that say when it is called, and when it returns."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        said = _tell_call(args, kwargs, tensors)
        entered = list(enter(token, path, said, *tensors))
        return _retell(args, entered), {name: _retell(value, entered) for name, value in kwargs.items()}

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        return leave(token, path, result)

    # As register_forward_hook does, which numbers them; a layer that has any is not followed.
    return {
        "_forward_pre_hooks": OrderedDict({-1: before}),
        "_forward_pre_hooks_with_kwargs": OrderedDict({-1: True}),
        "_forward_hooks": OrderedDict({-1: after}),
    }


def _tell_call(args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
    """What a layer is called with, but for its tensors, which are collected, and in which modes. Dynamo traces this."""
    given = [("", _tell(args, tensors)), *[(name, _tell(value, tensors)) for name, value in kwargs.items()]]
    autocast = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")]
    return tuple(given), (torch.is_grad_enabled(), *autocast)


def _tell(value: Any, tensors: list[torch.Tensor]) -> Any:
    """One argument, which is told as it is unless it is a tensor or has some in it. What a layer can write to, such as
    a list, is left to be found by whoever is told.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TENSOR
    if type(value) is tuple:
        return ("tuple", *[_tell(each, tensors) for each in value])
    return value


def _retell(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The same with other tensors, taken from the list. Dynamo traces this."""
    if isinstance(value, torch.Tensor):
        return tensors.pop(0)
    if type(value) is tuple:
        return tuple([_retell(each, tensors) for each in value])
    return value
