"""Choose the matrices that share a bucket under ZeRO-1 and 2, so that Muon's owners hold them whole without padding.

The seven matrices of a layer do not fill eight ranks, but eight equal matrices of neighbouring layers do. Nothing is
gathered just in time in these stages, so a bucket need not be a unit: matrices are collected in the order of the model
until there are as many of a size as ranks, and what is complete becomes a bucket about as large as a unit. Reductions
stay as small as that, whatever ranks own in the end. Sizes that do not come out even are left to the last bucket of the
forward pass, whose gradients are reduced first, with all of backward ahead to hide it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxshard.planner.layout import TensorSpec, aligned
from fxshard.planner.tuning import DEALT_SHARE, FIRST_DEALT_SHARE, MOST_PADDING
from fxshard.planner.units import Unit
from fxshard.planner.whole import whole_layout


@dataclass(frozen=True)
class Member:
    """A parameter as dealing sees it."""

    spec: TensorSpec
    kind: Hashable
    """Parameters of different kinds are never in one bucket."""
    ranks: int
    matrix: bool
    """Whether it is a matrix that Muon wants whole; stacks of matrices are cut between them."""


@dataclass(frozen=True)
class Dealt:
    """Units in the order of forward, and the names of those that whole layouts were made for."""

    units: tuple[Unit, ...]
    whole: frozenset[str]


def deal(units: Sequence[Unit], members: Mapping[str, Member]) -> Dealt | None:
    """Units whose matrices fill their ranks, or None where that would pad too much.

    Sizes that do not come out even may do so together with some that do: more and more of the last units are then kept
    together, up to all of them.
    """
    count = sum(any(members[name].matrix for name in unit.params) for unit in units)
    pooled = 0
    while count:
        dealt = _deal(units, members, count - pooled)
        if _padding(dealt, members) <= MOST_PADDING:
            return dealt
        if pooled == count:
            return None
        pooled = min(count, 2 * pooled or 1)
    return None


def _complete(names: Sequence[str], members: Mapping[str, Member]) -> list[str]:
    """The matrices of one kind and size of which there are as many as ranks, the oldest first."""
    alike: dict[tuple[Hashable, int], list[str]] = defaultdict(list)
    for name in names:
        alike[members[name].kind, aligned(members[name].spec.numel)].append(name)
    found: list[str] = []
    for same in alike.values():
        ranks = members[same[0]].ranks
        found += same[: len(same) // ranks * ranks]
    return found


def _deal(units: Sequence[Unit], members: Mapping[str, Member], dealt_units: int) -> Dealt:
    """Deal the matrices of so many units; those of the others stay together in the last bucket."""
    place = {name: i for i, unit in enumerate(units) for name in unit.params}
    sizes = [sum(members[n].spec.numel for n in unit.params if members[n].matrix) for unit in units]
    average = sum(sizes) / max(1, sum(size > 0 for size in sizes))
    held: list[str] = []  # matrices on the way to a bucket
    others: list[str] = []  # the small parameters that go with them
    made: list[list[str]] = []
    alone: list[Unit] = []
    seen = 0
    for unit, size in zip(units, sizes, strict=True):
        matrices, small, large = _parts(unit, members, size)
        if not size:
            alone.append(unit)
            continue
        if large:
            alone.append(Unit(f"{unit.name} (others)", tuple(large)))
        held += matrices
        others += small
        seen += 1
        ready = _complete(held, members) if seen <= dealt_units else []
        least = (DEALT_SHARE if made else FIRST_DEALT_SHARE) * average
        if sum(members[name].spec.numel for name in ready) >= max(1, least):
            made.append([*ready, *others])
            taken = set(ready)
            held, others = [name for name in held if name not in taken], []
    rest = [*held, *others]
    if any(members[name].matrix for name in rest) or not made:
        made.append(rest)
    else:
        made[-1] += rest
    order = {name: (place[name], units[place[name]].params.index(name)) for names in made for name in names}
    named = list(_named([sorted(names, key=order.__getitem__) for names in made], units, place))
    in_order = sorted([*alone, *named], key=lambda unit: min(place[name] for name in unit.params))
    return Dealt(tuple(in_order), frozenset(unit.name for unit in named))


def _parts(unit: Unit, members: Mapping[str, Member], size: int) -> tuple[list[str], list[str], list[str]]:
    """(matrices, small parameters, large ones that would not fit between the matrices)"""
    matrices = [name for name in unit.params if members[name].matrix]
    others = [name for name in unit.params if not members[name].matrix]
    large = [name for name in others if members[name].spec.numel * members[name].ranks > MOST_PADDING * size]
    return matrices, [name for name in others if name not in large], large


def _named(made: Sequence[Sequence[str]], units: Sequence[Unit], place: Mapping[str, int]) -> Iterator[Unit]:
    """Units named after the first and the last that they have parameters of."""
    taken: dict[str, int] = {}
    for names in made:
        first, last = units[place[names[0]]].name, units[place[names[-1]]].name
        name = first if first == last else f"{first}…{last}"
        taken[name] = taken.get(name, 0) + 1
        yield Unit(name if taken[name] == 1 else f"{name} #{taken[name]}", tuple(names))


def _padding(dealt: Dealt, members: Mapping[str, Member]) -> float:
    """Padding of the whole layouts, as a share of what they hold."""
    padded = held = 0
    for unit in dealt.units:
        if unit.name not in dealt.whole:
            continue
        kinds: dict[Hashable, list[Member]] = defaultdict(list)
        for name in unit.params:
            kinds[members[name].kind].append(members[name])
        for of_kind in kinds.values():
            layout = whole_layout([member.spec for member in of_kind], of_kind[0].ranks)
            padded += layout.padding
            held += layout.numel - layout.padding
    return padded / max(1, held)
