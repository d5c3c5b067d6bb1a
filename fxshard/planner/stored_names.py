"""Find the stored tensor of each parameter: the one of its name, or experts that are stored in another layout.

A layer's experts are one tensor each (``experts.3.w1.weight``, or ``experts.w1.weight3`` as in Transformer Engine's
grouped linears) or one tensor together (``experts.w1``, with or without ``.weight``), whose first dimension counts
them. Names tell which belong together; shapes and numbers must agree. ``module.`` in front of all names, as wrappers
leave it, means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxshard._torch.errors import StateError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """``names`` stored tensors: one of them, or (``stacked``) all on top of each other; ``index``: one slice of one."""

    names: tuple[str, ...]
    stacked: bool = False
    index: int | None = None


@dataclass
class Sources:
    """Where every parameter comes from, what could not be found and why, and what no parameter asked for."""

    of: dict[str, Source] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @property
    def regrouped(self) -> list[str]:
        return sorted(name for name, source in self.of.items() if source.stacked or source.index is not None)


def find_sources(wanted: Mapping[tuple[str, ...], Shape], stored: Mapping[str, Shape]) -> Sources:
    """Match parameters (all names of each, and its shape) with stored tensors."""
    ours, theirs = wrapping(name for names in wanted for name in names), wrapping(stored)
    if ours == theirs:
        return _find(wanted, stored)
    found = _find(
        {tuple(name.removeprefix(ours) for name in names): shape for names, shape in wanted.items()},
        {name.removeprefix(theirs): shape for name, shape in stored.items()},
    )
    return Sources(
        {
            ours + name: replace(source, names=tuple(theirs + stored for stored in source.names))
            for name, source in found.of.items()
        },
        found.problems,
        [theirs + name for name in found.unused],
    )


def wrapping(names: Iterable[str]) -> str:
    """How often all names begin with ``module.``, written out."""
    listed, found = list(names), ""
    while listed and all(name.startswith(f"{found}module.") for name in listed):
        found += "module."
    return found


def _find(wanted: Mapping[tuple[str, ...], Shape], stored: Mapping[str, Shape]) -> Sources:
    found = Sources()
    used: set[str] = set()
    missing: dict[str, Shape] = {}
    for names, shape in wanted.items():
        present = [name for name in names if name in stored]
        used.update(present)
        if not present:
            missing[names[0]] = shape
        elif stored[present[0]] != shape:
            found.problems.append(f"{present[0]} has shape {stored[present[0]]} there and {shape} here")
        else:
            found.of[names[0]] = Source((present[0],))
    free = {name: shape for name, shape in stored.items() if name not in used}
    for name, shape in missing.items():
        source = _regrouped(name, shape, missing, free)
        if isinstance(source, Source):
            found.of[name] = source
            used.update(source.names)
        else:
            found.problems.append(f"{name} is missing{source}")
    found.unused = sorted(stored.keys() - used)
    return found


def _regrouped(name: str, shape: Shape, missing: Mapping[str, Shape], free: Mapping[str, Shape]) -> Source | str:
    """The experts that make up ``name``, or why there are none: empty, or a reason to append."""
    candidates: list[Source] = []
    reasons: list[str] = []
    for pattern, members in _numbered(free, _joined(name)).items() if shape else ():
        if sorted(members) != list(range(shape[0])):
            reasons.append(f"{pattern} has numbers {_listed(sorted(members))} where 0 to {shape[0] - 1} are needed")
        elif any(free[member] != shape[1:] for member in members.values()):
            reasons.append(f"{pattern} has other shapes than {shape[1:]}")
        else:
            candidates.append(Source(tuple(members[i] for i in range(shape[0])), stacked=True))
    for pattern, joined, number in _patterns(name):
        together = [other for other in free if _joined(other) == joined]
        for other in together:
            siblings = _numbered(missing, joined)[pattern]
            if free[other][1:] != shape:
                reasons.append(f"{other} has shape {free[other]}")
            elif sorted(siblings) != list(range(free[other][0])):
                reasons.append(f"{other} holds {free[other][0]}, the model misses {_listed(sorted(siblings))}")
            else:
                candidates.append(Source((other,), index=number))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        reasons = ["it could be " + " or ".join(_shown(source) for source in candidates)]
    return f" ({'; '.join(reasons)}: left alone)" if reasons else ""


def _numbered(names: Sequence[str] | Mapping[str, Shape], joined: str) -> dict[str, dict[int, str]]:
    """Pattern → number → name, of the names that are ``joined`` with a number somewhere in it."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        for pattern, without, number in _patterns(name):
            if without == joined:
                found.setdefault(pattern, {})[number] = name
    return found


def _patterns(name: str) -> Iterator[tuple[str, str, int]]:
    """(``experts.*.w1.weight``, ``experts.w1``, 3) for each number in ``experts.3.w1.weight``, or in ``w1.weight3``."""
    parts = name.split(".")
    if indexed := re.fullmatch(r"(weight|bias)(0|[1-9][0-9]*)", parts[-1]):
        kind, number = indexed.groups()
        yield ".".join([*parts[:-1], f"{kind}*"]), _joined(".".join([*parts[:-1], kind])), int(number)
    for i, part in enumerate(parts):
        if part.isdecimal() and part == str(int(part)):
            pattern = ".".join([*parts[:i], "*", *parts[i + 1 :]])
            yield pattern, _joined(".".join(parts[:i] + parts[i + 1 :])), int(part)


def _joined(name: str) -> str:
    return name.removesuffix(".weight")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if numbers[8:] else "")


def _shown(source: Source) -> str:
    return f"{source.names[0]} and {len(source.names) - 1} more" if source.stacked else source.names[0]


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
            value = join(of_one[0], found.of[of_one[0]], given)
            made |= {name: given.get(name, value) for name in of_one}
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
