"""Values as text that is the same in every process in which it means the same.

Only what has a name for sure has such a text: plain values, torch's own functions, dataclasses of these. For anything
else, a function of the user's for one, :class:`Unnamed` is raised.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any

import torch

from fxshard import _compat

PLAIN = (type(None), bool, int, float, complex, str, bytes, types.EllipsisType, range)
OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unnamed(Exception):
    """Something of which no other process can tell that it has the same."""


def canonical(value: Any) -> str:
    """The text of a value."""
    kind = type(value)
    if kind in PLAIN:
        return repr(value)
    if kind in (tuple, list, torch.Size):
        return f"{kind.__name__}({','.join(map(canonical, value))})"
    if isinstance(value, enum.Enum):
        return f"{_name(kind)}.{value.name}"
    if kind in OF_TORCH:
        return str(value)
    if kind in (set, frozenset):
        return f"set({','.join(sorted(map(canonical, value)))})"
    if isinstance(value, Mapping) and kind in (dict, types.MappingProxyType):
        return f"dict({','.join(f'{canonical(key)}:{canonical(item)}' for key, item in value.items())})"
    if kind is slice:
        return f"slice{canonical((value.start, value.stop, value.step))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{field.name}={canonical(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{_name(kind)}({','.join(fields)})"
    return _name(value)


def _name(value: Any) -> str:
    """Where torch, Python or fxshard has a function, a class or an operator."""
    name = _compat.own_name(value)
    if name is None:
        raise Unnamed(f"{type(value).__name__} {value!r:.200}")
    return name
