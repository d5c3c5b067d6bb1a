"""Tensors of a state dict put into another layout of experts: stacked, or taken out of a stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxshard._torch.errors import StateError
from fxshard.plan.stored_names import Source, find_sources


def in_our_layout(own: Mapping[str, torch.Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of whole tensors under the keys of ``own``, as far as they are found; the rest stays as it is."""
    shaped = {name: tuple(value.shape) for name, value in given.items() if isinstance(value, torch.Tensor)}
    names: dict[int, list[str]] = {}  # of a tied parameter, one will do
    for name, value in own.items():
        names.setdefault(id(value), []).append(name)
    found = find_sources({tuple(of_one): tuple(own[of_one[0]].shape) for of_one in names.values()}, shaped)
    made: dict[str, Any] = {}
    for of_one in names.values():
        if of_one[0] in found.of:
            made |= dict.fromkeys(of_one, join(of_one[0], found.of[of_one[0]], given))
    left = set(found.unused) | (given.keys() - shaped.keys())
    problems = {name: given[name] for name in own if name in given and name not in made}  # of another shape
    return {**{name: value for name, value in given.items() if name in left}, **problems, **made}


def join(name: str, source: Source, given: Mapping[str, Any]) -> torch.Tensor:
    """The tensor that a source stands for."""
    parts = [given[stored] for stored in source.names]
    if not source.stacked and source.index is None:
        return parts[0]
    if any(isinstance(part, DTensor) for part in parts):
        raise StateError(
            f"{name} would be put together from {source.names[0]}, which is sharded: give load_state_dict whole "
            "tensors (full_state_dict), or use fxshard.save and fxshard.load"
        )
    return torch.stack(parts) if source.stacked else parts[0][source.index]


def join_state(name: str, source: Source, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer state that a source stands for: moments as the parameter, one count of steps."""
    parts = [states[stored] for stored in source.names]
    if not source.stacked and source.index is None:
        return dict(parts[0])
    counts = {float(part["step"]) for part in parts if "step" in part}
    if len(counts) > 1:
        raise StateError(f"{name}: its parts made different numbers of steps, and it has one count for all")
    fields: Sequence[str] = [field for field in parts[0] if field != "step"]
    made: dict[str, Any] = {field: join(name, source, {n: states[n][field] for n in source.names}) for field in fields}
    return {**made, "step": parts[0]["step"]} if "step" in parts[0] else made
