"""Parameters that are cut over tensor-parallel ranks: which part a rank has (:class:`Piece`) before data parallelism
cuts that part into rows; which of these ranks puts each of Muon's matrices together and orthogonalizes it, and what
they send each other.

All ranks of the group hold parts of the same matrices, so each has the same ones to deal out. One all-to-all there and
one back move every part once, and nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fxshard.planner.matrices import least_loaded, matrix_cost, newton_schulz_flops
from fxshard.planner.model_groups import ModelGroup


@dataclass(frozen=True)
class Whole:
    """A matrix, or a stack of them, as the ranks that have parts of it hold it together."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Cuts:
    """The matrices of a bucket that are cut, each rank of a tensor-parallel group having an equal part of each."""

    group: ModelGroup
    wholes: tuple[Whole, ...]
    """In the order of the bucket's matrices."""

    @cached_property
    def whole(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {each.name: each.shape for each in self.wholes}

    def of(self, matrices: Sequence[str]) -> Cuts | None:
        """The cuts of some matrices, in their order; None where none of them is cut."""
        wholes = tuple(Whole(name, self.whole[name]) for name in matrices if name in self.whole)
        return Cuts(self.group, wholes) if wholes else None

    def dim(self, name: str, part: Sequence[int]) -> int | None:
        """Along which dimension a matrix is cut into such parts; None: along none of its own two."""
        whole = self.whole[name]
        cut = [dim for dim, (all_of, own) in enumerate(zip(whole, part, strict=False)) if all_of != own]
        if len(whole) != len(part) or len(cut) != 1 or cut[0] < len(part) - 2:
            return None
        return cut[0] if whole[cut[0]] == part[cut[0]] * self.group.ranks else None


@dataclass(frozen=True)
class Part:
    """A rank's part of a matrix, or of each matrix of a stack, and the dimension along which it is cut."""

    name: str
    shape: tuple[int, ...]
    dim: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def whole(self, ranks: int) -> tuple[int, ...]:
        """The shape of what the parts of all ranks make."""
        return tuple(size * ranks if dim == self.dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True)
class Parts:
    """Matrices whose parts travel together: one all-to-all to the ranks that orthogonalize them, one back."""

    group: ModelGroup
    members: tuple[Part, ...]

    @property
    def most(self) -> int:
        """Elements that reach the rank with most to orthogonalize, and that it sends back; any other moves fewer."""
        return self.group.ranks * max(self.to_owners())

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank that has each whole matrix: the largest are dealt first, each to the rank with the least to do."""
        costs = [matrix_cost(part.whole(self.group.ranks)) for part in self.members]
        owners, loads = [0] * len(costs), [0.0] * self.group.ranks
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            owners[i] = least_loaded(loads)
            loads[owners[i]] += costs[i]
        return tuple(owners)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Positions in the order in which parts are sent: by owner, and within an owner as they are listed."""
        return tuple(sorted(range(len(self.members)), key=lambda i: self.owners[i]))

    def owned(self, rank: int) -> list[int]:
        """Positions of the matrices that ``rank`` orthogonalizes."""
        return [i for i, owner in enumerate(self.owners) if owner == rank]

    def to_owners(self) -> list[int]:
        """Elements that every rank sends to each rank: its parts of what the other owns."""
        return [sum(self.members[i].numel for i in self.owned(rank)) for rank in range(self.group.ranks)]

    def from_each(self, rank: int) -> list[int]:
        """Elements that ``rank`` gets from each rank: their parts of what it owns."""
        return [self.to_owners()[rank]] * self.group.ranks

    def flops(self) -> int:
        """Operations of the rank with most to do."""
        work = [0] * self.group.ranks
        for part, owner in zip(self.members, self.owners, strict=True):
            work[owner] += newton_schulz_flops(part.whole(self.group.ranks))
        return max(work)


@dataclass(frozen=True)
class Piece:
    """Part ``index`` of ``parts`` equal ones along ``dim`` of a parameter; without a ``dim``, all of it."""

    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    dim: int | None
    parts: int
    index: int

    @property
    def start(self) -> int:
        """Where the part begins along ``dim``."""
        return 0 if self.dim is None else self.shape[self.dim] // self.parts * self.index

    @property
    def counts(self) -> bool:
        """Whether this rank is the one of several with the same elements that counts them, in a norm."""
        return self.dim is not None or self.index == 0

    @property
    def cuts_matrices(self) -> bool:
        """Whether a rank has less than whole matrices; experts that are dealt out to ranks are whole."""
        return self.dim is not None and self.dim >= len(self.shape) - 2 and self.parts > 1

    def offsets(self, row: int) -> tuple[int, ...]:
        """Where in the whole parameter a row of the part begins."""
        return tuple(at + (self.start if dim == self.dim else 0) for dim, at in enumerate(row_offsets(self.shape, row)))

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor, a view."""
        if self.dim is None:
            return whole
        return whole.narrow(self.dim, self.start, self.shape[self.dim] // self.parts)


def row_offsets(shape: Sequence[int], row: int) -> tuple[int, ...]:
    """Where in a tensor of this shape a row begins."""
    return (row, *[0] * (len(shape) - 1)) if shape else ()
