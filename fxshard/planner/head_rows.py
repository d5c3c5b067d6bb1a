"""The rows of its projections that make each head of an attention, for code that scales heads one by one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Projection:
    """A parameter whose rows make queries or keys, and others too where several projections are one weight."""

    weight: str
    bias: str | None
    head_of_row: tuple[int, ...]
    """For each row, the head that it belongs to; -1 for rows that make something else."""

    @property
    def heads(self) -> int:
        return max(self.head_of_row) + 1


@dataclass(frozen=True)
class AttentionHeads:
    """An attention of the model. Heads of queries may share heads of keys: as many in a row as there are times more."""

    where: str
    query: Projection
    key: Projection

    @property
    def heads(self) -> int:
        return self.query.heads

    @property
    def shares_keys(self) -> bool:
        return self.key.heads < self.query.heads
