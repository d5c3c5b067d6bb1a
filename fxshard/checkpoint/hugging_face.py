"""Weights in and out as safetensors files, a few rows at a time: no rank ever holds the whole model.

Since version 5 of ``transformers`` some models keep their parameters otherwise than their files do: experts are stored
one by one and held together, gate and up projection in one. The library says how, for each model; here that is carried
out for one parameter at a time, when it is read.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fxshard._torch.errors import CheckpointError, ConfigError
from fxshard.checkpoint.fit import Stored, match_model, targets
from fxshard.checkpoint.held import MODEL, Held, of_model
from fxshard.checkpoint.partial import Partial, prepare
from fxshard.checkpoint.planners import Target
from fxshard.checkpoint.ranks import Ranks
from fxshard.checkpoint.saving import check_model, wait_for_save
from fxshard.frontend.exporting import INDEX, SafetensorsWriter, refuse_groups, whole_tensors
from fxshard.frontend.module import ShardedModule

Rename = Callable[[str], str | None]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Own = dict[str, tuple[int, set[str]]]
"""Of experts that ranks have under one name: which part of them is this rank's, and what it reads them from."""


def load_safetensors(model: ShardedModule, paths: Paths, *, rename: Rename | None = None) -> list[str]:
    """Load weights from safetensors files, each rank reading only its own rows. Collective.

    ``paths``: a file, several, or a folder as Hugging Face lays it out. ``rename`` maps a name in the files to the
    model's, or to None to leave it out; without it, names of a model from ``transformers`` are taken as that library
    takes them. Values are converted to the dtype that the model keeps. Experts may be stored one by one or together.
    Everything is checked first. Returns notes on what was stored in another layout.

    >>> fxshard.checkpoint.load_safetensors(model, "Qwen3-0.6B", rename=lambda name: name.removeprefix("model."))
    """
    ranks = check_model(model)
    wait_for_save(model)
    problems: list[str] = []
    with ExitStack() as open_files:
        try:
            where = _contents(paths, rename, open_files)
            where = where if rename is not None else as_in_memory(model._inner, where, model._tensors().keys())
        except (CheckpointError, OSError) as error:
            where = {}
            problems.append(str(error))
        regrouped = fill_rows(model, where, ranks, problems)
    return [f"experts stored in another layout: {', '.join(regrouped)}"] if regrouped else []


def fill_rows(model: ShardedModule, where: Mapping[str, Slice], ranks: Ranks, problems: Sequence[str]) -> list[str]:
    """Fill this rank's rows of the model from slices by name, if everything fits; returns names of experts that were
    stored in another layout. Collective. ``problems``: what was found before."""
    found = list(problems)
    wanted: list[Target] = []
    regrouped: list[str] = []
    own: Own = {}
    if where:
        try:
            wanted, regrouped, own = _planned(model, where, ranks, found)
        except ConfigError as error:  # other ranks, whose files could not be read, wait in settle
            found.append(str(error))
    found += _read_by_others(own, ranks)
    ranks.settle(found, "the files do not fit, nothing was loaded")
    failed = _copy(wanted, where)
    model.parameters_changed()
    ranks.settle(failed, "the files could not be read to the end, load others before training on")
    return regrouped


def _planned(
    model: ShardedModule, where: Mapping[str, Slice], ranks: Ranks, problems: list[str]
) -> tuple[list[Target], list[str], Own]:
    """The targets of this rank, the experts that were stored in another layout, and those under names of its own."""
    stored = {f"{MODEL}.{name}": Stored(tuple(at.get_shape()), None) for name, at in where.items()}
    held, parts = _in_files(model, stored, ranks)
    match = match_model(held, stored)
    problems += [*match.problems, *(f"{name} is not in the model" for name in match.unused)]
    wanted = targets(held, match.of, stored, problems)
    problems += _kinds(wanted, where)
    own = {
        name: (part, {place for key in match.of[name].names for place in where[key].places()})
        for name, part in parts.items()
        if name in match.of
    }
    return wanted, match.regrouped, own


def _in_files(model: ShardedModule, stored: Mapping[str, Stored], ranks: Ranks) -> tuple[list[Held], dict[str, int]]:
    """The rows to read: this rank's part of all ranks' experts where files have them together, or its own by name.
    Of the latter: which part they are."""
    together = list(of_model(model, ranks.parts, loading=True))
    there = match_model(together, stored).of
    held: list[Held] = []
    parts: dict[str, int] = {}
    for whole, own in zip(together, of_model(model), strict=True):
        held.append(whole if whole.names[0] in there else own)
        if held[-1].shape != whole.shape:
            parts[own.names[0]] = ranks.parts[model._sharding.domain_of(own.names[0]).name].index
    return held, parts


def _read_by_others(own: Own, ranks: Ranks) -> list[str]:
    """What this rank takes for its own, and ranks with other experts for theirs. Collective."""
    found = []
    for each in ranks.gather(own) if ranks.parts else ():
        for name in own.keys() & each.keys():
            if own[name][0] != each[name][0] and (both := own[name][1] & each[name][1]):
                found.append(
                    f"{name} is another parameter on other ranks, because of groups=, and these would read {min(both)} "
                    "too: stack the experts of all ranks in one tensor, of which each reads its part, or give each "
                    "rank files, or by rename= names in them, of its own"
                )
    return sorted(set(found))


def save_safetensors(
    model: ShardedModule,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    rename: Callable[[str], str] | None = None,
    file_bytes: int = 5 * 10**9,
) -> Path:
    """Save weights as a folder of safetensors files with an index, as Hugging Face lays it out. Collective.

    Units are gathered one after the other and written by the first rank, whose memory holds a unit and a file at most.
    ``dtype``: what floating-point values are converted to; by default they are saved as they are kept, in full.
    ``rename`` maps the model's names to those in the files.
    """
    ranks = check_model(model)
    refuse_groups(model._sharding)
    path = Path(path)
    ranks.doing = f"saving {path}"
    partial: Partial | None = None
    failure: str | None = None
    if ranks.rank == 0:
        try:
            partial = prepare(path)
        except CheckpointError as error:
            failure = str(error)
    ranks.settle([failure] if failure else [], "nothing was saved")
    writer = SafetensorsWriter(partial.folder, file_bytes) if partial is not None else None
    for names, value in whole_tensors(model._tensors(), model._sharding.buckets):
        if writer is None or failure is not None:
            continue  # the others are still gathering: go on with them
        try:
            value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            for name in names:
                writer.add(rename(name) if rename is not None else name, value)
        except Exception as error:
            failure = str(error)
    if writer is not None and partial is not None and failure is None:
        try:
            writer.close()
            partial.publish()
        except OSError as error:
            failure = str(error)
    if partial is not None and failure is not None:
        partial.abandon()
    ranks.settle([failure] if failure else [], f"{path} was not saved")
    return path


def _contents(paths: Paths, rename: Rename | None, open_files: ExitStack) -> dict[str, Slice]:
    """The model's name → a tensor in an open file."""
    found: dict[str, Slice] = {}
    for path in _files(paths):
        file = open_files.enter_context(_safe_open(path))
        for name in file.keys():  # noqa: SIM118 - no mapping
            ours = rename(name) if rename is not None else name
            if ours is not None and ours in found:
                raise CheckpointError(f"{ours} is there twice, the second time as {name} in {path}")
            if ours is not None:
                found[ours] = InFile(file.get_slice(name), f"{name} in {path.resolve()}")
    if not found:
        raise CheckpointError(f"no tensors in {paths}")
    return found


def _files(paths: Paths) -> Iterator[Path]:
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        path = Path(path)
        if path.is_dir() and (path / INDEX).is_file():
            try:
                names = set(json.loads((path / INDEX).read_text())["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{path / INDEX} is damaged: {error!r}") from error
            yield from sorted(path / name for name in names)
        elif path.is_dir():
            yield from sorted(path.glob("*.safetensors"))
        else:
            yield path


def _safe_open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError("safetensors is not installed: pip install safetensors") from None
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _kinds(wanted: Sequence[Target], where: Mapping[str, Slice]) -> list[str]:
    """Problems of kind: whole numbers must not become fractions, nor the other way round."""
    found = []
    for target in wanted:
        stored = where[target.key.removeprefix(f"{MODEL}.")].get_dtype()
        if stored.startswith(("F", "BF")) != target.tensor.is_floating_point():
            found.append(f"{target.key} is {stored} there and {target.tensor.dtype} here")
    return found


@torch.no_grad()
def _copy(wanted: Sequence[Target], where: Mapping[str, Slice]) -> list[str]:
    """Read one target after the other; returns what went wrong, if anything did."""
    for target in wanted:
        part = tuple(slice(at, at + n) for at, n in zip(target.offsets, target.tensor.shape, strict=True))
        try:
            target.tensor.copy_(where[target.key.removeprefix(f"{MODEL}.")][part or ...])
        except Exception as error:
            return [f"{target.key}: {error}"]
    return []


class Slice(Protocol):
    """A tensor in a file, of which parts can be read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, part: Any, /) -> torch.Tensor: ...

    def places(self) -> set[str]:
        """Names in files."""
        ...


@dataclass(frozen=True)
class InFile:
    """A tensor as a file has it."""

    slice: Any
    place: str

    def get_shape(self) -> list[int]:
        return self.slice.get_shape()  # type: ignore[no-any-return]

    def get_dtype(self) -> str:
        return self.slice.get_dtype()  # type: ignore[no-any-return]

    def __getitem__(self, part: Any, /) -> torch.Tensor:
        return self.slice[part]  # type: ignore[no-any-return]

    def places(self) -> set[str]:
        return {self.place}


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

    def places(self) -> set[str]:
        return {place for found in self.sources.values() for each in found for place in each.places()}

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
    """The results of a converter for some tensors: tried with tensors that have shapes and no memory."""
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
