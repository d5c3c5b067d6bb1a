"""Whether two modules do the same to what they are called with, and whether a module is still what it was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

VALUES = (
    *(int, float, complex, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules differ in nothing but the values of their tensors.

    They are of the same classes, and what is in them is the same object, an equal value, or a tensor of the same kind
    in the same place. What is shared inside one of them is shared inside the other, and a tensor that both have in
    another way than as a parameter or buffer is no parameter or buffer of one of them.
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
        return equal(a, b) and all(self._pair(held, held) for held in _held(a) if isinstance(held, torch.Tensor))

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
    return ordinary and is_all_in_its_attributes(module) and "forward" not in vars(module)


def is_all_in_its_attributes(module: nn.Module) -> bool:
    """Whether a module is no list or dict as well, and has no slots: another with its attributes does the same."""
    return type(module).__basicsize__ == nn.Module.__basicsize__


def knows_modules(module: nn.Module) -> bool:
    """Whether a module has others than its submodules, with which it might compare them."""
    own = ("_modules", "_parameters", "_buffers")
    values = (value for name, value in vars(module).items() if name not in own)
    return any(isinstance(held, nn.Module) for value in values for held in _held(value))


def _held(value: Any) -> Iterator[Any]:
    """A value, and if it is a container all that is in it."""
    found, queue = set(), [value]
    while queue:
        each = queue.pop()
        yield each
        if isinstance(each, tuple | list | dict | set | frozenset) and id(each) not in found:
            found.add(id(each))
            queue += _members(each)


def _members(container: Any) -> Iterable[Any]:
    return chain(container, container.values()) if isinstance(container, dict) else container


def equal(a: Any, b: Any) -> bool:
    """Whether two attributes are the same, or values of which nothing can be told but that they are equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, VALUES):
        return bool(a == b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return equal([*a], [*b]) and all(map(equal, a.values(), b.values()))
    if isinstance(a, set | frozenset):
        return a == b and all(isinstance(member, VALUES) for member in a)
    return False


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    shape = (tensor.shape, tensor.stride(), tensor.storage_offset())
    return type(tensor), *shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_leaf


class Seen:
    """What was in modules when they were looked at. It is compared at each call, so nothing is done for each of them
    that can be done for all at once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [*modules]
        self._classes = [*map(type, self._modules)]
        containers = [
            each for module in self._modules for each in _held(vars(module)) if isinstance(each, dict | list | set)
        ]
        self._empty = [each for each in containers if not each]
        self._full = [each for each in containers if each]
        self._lengths = [*map(len, self._full)]
        views = ((each.keys(), each.values()) if isinstance(each, dict) else (each,) for each in self._full)
        self._views = [*chain.from_iterable(views)]
        self._members = [*chain.from_iterable(self._views)]

    def lasts(self) -> bool:
        """Whether all of it is still there, and nothing else."""
        return (
            all(map(operator.is_, map(type, self._modules), self._classes))
            and not any(self._empty)
            and all(map(operator.eq, map(len, self._full), self._lengths))
            and all(map(operator.is_, chain.from_iterable(self._views), self._members))
        )
