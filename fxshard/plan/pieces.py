"""Tensor parallelism: which part of a parameter a rank has before data parallelism cuts that part into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """Part ``index`` of ``parts`` equal ones along ``dim`` of a parameter; without a ``dim``, all of it."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
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
