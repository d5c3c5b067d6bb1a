"""Whether a checkpoint fits a model, and what each rank has to read if it does: decided before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fxshard.checkpoint.held import MODEL, OPTIMIZER, Held
from fxshard.checkpoint.planners import Landing, Target
from fxshard.planner.stored_names import Shape, Source, Sources, find_sources


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of a tensor in a checkpoint or a file."""

    shape: Shape
    dtype: torch.dtype | None
    """None where any dtype will do, because values are converted."""


def fields_in(stored: Mapping[str, Stored]) -> dict[str, list[str]]:
    """Parameter → the fields of optimizer state that are stored for it."""
    found: dict[str, list[str]] = {}
    for key in stored:
        if key.startswith(f"{OPTIMIZER}."):
            name, _, field = key.removeprefix(f"{OPTIMIZER}.").rpartition(".")
            found.setdefault(name, []).append(field)
    return found


def match_model(held: Sequence[Held], stored: Mapping[str, Stored]) -> Sources:
    """Where the parameters and buffers of a model are stored."""
    wanted = {one.names: one.shape for one in held}
    begin = f"{MODEL}."
    shapes = {key.removeprefix(begin): value.shape for key, value in stored.items() if key.startswith(begin)}
    return find_sources(wanted, shapes)


def targets(
    held: Sequence[Held], sources: Mapping[str, Source], stored: Mapping[str, Stored], problems: list[str]
) -> list[Target]:
    """The reads into the rows that this rank holds. Every rank looks at every tensor, so that all see all problems."""
    found: list[Target] = []
    for one in held:
        source = sources.get(one.names[0])
        if source is None:
            continue  # reported when the names were matched
        keys = [one.key(name) for name in source.names]
        if missing := [key for key in keys if key not in stored]:
            problems.append(f"{missing[0]} is missing")
        elif wrong := [key for key in keys if stored[key].dtype not in (None, one.tensor.dtype)]:
            problems.append(f"{wrong[0]} is {_short(stored[wrong[0]].dtype)} there and {_short(one.tensor.dtype)} here")
        elif wrong := [key for key in keys if stored[key].shape != _stored_shape(one, source, stored[key].shape)]:
            problems.append(f"{wrong[0]} has shape {stored[wrong[0]].shape} there and {one.shape} here")
        elif one.tensor.numel():
            landing = Landing(one.deferred) if one.deferred is not None else None
            rows = one if landing is None else replace(one, tensor=landing.tensor)
            found += [replace(target, landing=landing) for target in _reads(rows, source, keys)]
    return found


def _reads(one: Held, source: Source, keys: Sequence[str]) -> Iterator[Target]:
    if not one.shape or (not source.stacked and source.index is None):
        yield Target(keys[0], one.offsets, one.tensor)
    elif source.stacked:  # rows of the whole are experts
        for i in range(one.tensor.shape[0]):
            yield Target(keys[one.offsets[0] + i], one.offsets[1:], one.tensor[i])
    else:
        assert source.index is not None
        yield Target(keys[0], (source.index, *one.offsets), one.tensor.unsqueeze(0))


def _stored_shape(one: Held, source: Source, found: Shape) -> Shape:
    """The shape that a stored tensor must have for ``one`` to be read from it."""
    if not one.shape:
        return ()
    if source.stacked:
        return one.shape[1:]
    return one.shape if source.index is None else (*found[:1], *one.shape)


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
