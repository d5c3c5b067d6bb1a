"""Over which ranks a parameter is data-parallel: how many shards, how many replicas of each, and what gradients mean.

One row per process group of the model: its own ranks (plain or HSDP), and those of expert parameters. ZeRO stages are
placements: which of parameters, gradients and optimizer state are sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from fxshard._torch.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """Whether parameters, gradients and optimizer state are sharded over the data-parallel ranks, or replicated."""

    param: bool
    grad: bool
    state: bool


ZERO: dict[int, Placement] = {
    0: Placement(param=False, grad=False, state=False),
    1: Placement(param=False, grad=False, state=True),
    2: Placement(param=False, grad=True, state=True),
    3: Placement(param=True, grad=True, state=True),
}


@dataclass(frozen=True)
class BytesPerRank:
    """Bytes that one rank holds at rest."""

    param: int
    grad: int
    state: int


Reduction = Literal["mean", "sum"]
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Domain:
    """``shards`` ranks hold different rows; each shard exists on ``replicas`` ranks.

    Gradients are added up over all ``ranks`` and divided by ``divisor``. ``stride``: how many ranks apart the holders
    of neighbouring shards are, which decides what they share a node with.
    """

    shards: int = 1
    replicas: int = 1
    divisor: float = 1
    name: str = ""
    """The pattern of parameter names that it belongs to; empty for the model's own ranks."""
    device: str = ""
    stride: int = 1

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas

    def group(self, ranks: int, what: str = "") -> str:
        """How a schedule calls a process group of this domain: ``cuda×8``, ``cuda×4 replicas``."""
        return " ".join(part for part in (self.name, f"{self.device}×{ranks}", what) if part)


UNKNOWN = Domain()
"""The domain of a bucket that was planned without one."""

DomainOf = Callable[[str], Domain]
"""From the name of a parameter to its domain."""


def data_parallel(shards: int, replicas: int, reduction: Reduction, device: str, stride: int = 1) -> Domain:
    """The domain of a model's own ranks; alone, there is no device to name a group after."""
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r}: expected 'mean' or 'sum'")
    domain = Domain(shards, replicas, stride=stride, device=device if shards * replicas > 1 else "")
    return replace(domain, divisor=domain.ranks if reduction == "mean" else 1)
