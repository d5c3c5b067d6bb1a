"""Published weights under the names and in the shapes of the model in memory, as ``transformers`` converts them.

Since its version 5 some models keep their parameters otherwise than their files do: experts are stored one by one and
held together, gate and up projection in one. The library says how, for each model; here that is carried out for one
parameter at a time, when it is read.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import nn


class Slice(Protocol):
    """A tensor in a file, of which parts can be read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, part: Any, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Converted:
    """A parameter that is put together from tensors in files; all of it is read, whichever part is asked for."""

    target: str
    converter: Any
    sources: Mapping[str, list[Slice]]
    """Pattern of the converter → what it found, in order."""
    shape: tuple[int, ...]
    first: str
    plain: nn.Module

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return next(iter(self.sources.values()))[0].get_dtype()

    def __getitem__(self, part: Any, /) -> torch.Tensor:
        values = {pattern: [each[...] for each in found] for pattern, found in self.sources.items()}
        return _convert(self.converter, values, self.first, self.plain)[self.target][part]


def as_in_memory(plain: nn.Module, stored: Mapping[str, Slice], names: Collection[str]) -> dict[str, Slice]:
    """Stored tensors by the model's names. Where ``transformers`` does not know the model, they stay as they are."""
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None or not hasattr(plain, "base_model_prefix"):
        return dict(stored)
    known = import_module("transformers.conversion_mapping").get_model_conversion_mapping(plain) or []
    converters = [each for each in known if isinstance(each, loading.WeightConverter)]
    renamings = [each for each in known if isinstance(each, loading.WeightRenaming)]
    in_model = dict.fromkeys(names, True)
    found: dict[str, Slice] = {}
    groups: dict[str, dict[str, list[Slice]]] = {}
    for key in sorted(stored, key=loading.dot_natural_key):  # experts in order of their numbers
        name, pattern = loading.rename_source_key(key, renamings, converters, plain.base_model_prefix, in_model)
        if name not in in_model and key in in_model:
            name, pattern = key, None
        if name not in in_model and _ignored(plain, name):
            continue
        if pattern is None or name not in in_model:
            found[name if name in in_model else key] = stored[key]
        else:
            groups.setdefault(name, {}).setdefault(pattern, []).append(stored[key])
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for first, sources in groups.items():
        found.update(_converted(by_pattern[next(iter(sources))], sources, first, plain))
    return found


def _converted(
    converter: Any, sources: Mapping[str, list[Slice]], first: str, plain: nn.Module
) -> dict[str, Converted]:
    """What a converter makes of some tensors: tried with tensors that have shapes and no memory."""
    empty = {
        pattern: [torch.empty(tuple(each.get_shape()), device="meta") for each in found]
        for pattern, found in sources.items()
    }
    return {
        name: Converted(name, converter, sources, tuple(value.shape), first, plain)
        for name, value in _convert(converter, empty, first, plain).items()
    }


def _convert(
    converter: Any, values: Mapping[str, list[torch.Tensor]], first: str, plain: nn.Module
) -> dict[str, torch.Tensor]:
    own = copy.deepcopy(converter)  # it collects what it is given
    for pattern, found in values.items():
        for value in found:
            own.add_tensor(first, first, pattern, value)
    made = own.convert(first, model=plain, config=plain.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _ignored(plain: nn.Module, name: str) -> bool:
    patterns = getattr(plain, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
