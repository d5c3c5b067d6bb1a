"""Whether two modules do the same to what they are called with, and whether a module is still what it was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_VALUES = (
    *(int, float, complex, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules differ in nothing but the values of their tensors.

    They are of the same classes, and what is in them is the same object, an equal value, or a tensor of the same kind
    in the same place. What is shared inside one of them is shared inside the other.
    """
    return _Comparison().modules(one, other)


class _Comparison:
    def __init__(self) -> None:
        self._there: dict[int, int] = {}
        self._back: dict[int, int] = {}

    def modules(self, a: nn.Module, b: nn.Module) -> bool:
        if id(a) in self._there or a is b:
            return self._pair(a, b)
        if type(a) is not type(b) or not is_plain(a) or vars(a).keys() != vars(b).keys() or not self._pair(a, b):
            return False
        return all(self._attribute(name, value, vars(b)[name]) for name, value in vars(a).items())

    def _attribute(self, name: str, a: Any, b: Any) -> bool:
        if name == "_modules":
            return self._each(a, b, self.modules)
        if name in ("_parameters", "_buffers"):
            return self._each(a, b, self._tensors)
        return equal(a, b)

    def _each(self, a: Mapping[str, Any], b: Mapping[str, Any], same: Callable[[Any, Any], bool]) -> bool:
        if list(a) != list(b):
            return False
        pairs = ((a[name], b[name]) for name in a)
        return all(x is y if x is None or y is None else same(x, y) for x, y in pairs)

    def _tensors(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return self._pair(a, b) and (a is b or _kind(a) == _kind(b))

    def _pair(self, a: object, b: object) -> bool:
        there, back = self._there.setdefault(id(a), id(b)), self._back.setdefault(id(b), id(a))
        return there == id(b) and back == id(a)


def is_plain(module: nn.Module) -> bool:
    """Whether a module's attributes are where they are in others, and its class says what calling it does."""
    kind = type(module)
    ordinary = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    return ordinary and "forward" not in vars(module)


def equal(a: Any, b: Any) -> bool:
    """Whether two attributes are the same, or values of which nothing can be told but that they are equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _VALUES):
        return bool(a == b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, set | frozenset):
        return a == b and all(isinstance(member, _VALUES) for member in a)
    return False


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    shape = (tensor.shape, tensor.stride(), tensor.storage_offset())
    return type(tensor), *shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_leaf


class Seen:
    """What was in a module when it was looked at."""

    def __init__(self, module: nn.Module) -> None:
        self._now = vars(module)
        self._attributes = (*self._now.values(),)
        containers = [value for value in self._attributes if isinstance(value, dict | list | set)]
        self._empty = [each for each in containers if not each]
        self._full = [(each, (*_members(each),)) for each in containers if each]

    def lasts(self) -> bool:
        """Whether all of it is still there, and nothing else. What is in containers inside containers is not seen."""
        return (
            len(self._now) == len(self._attributes)
            and all(map(operator.is_, self._now.values(), self._attributes))
            and not any(self._empty)
            and all(len(each) == len(had) and all(map(operator.is_, _members(each), had)) for each, had in self._full)
        )


def _members(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container
