"""ZeRO stages as placements: where parameters, gradients and optimizer state live. One table, no code paths."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """Which of the three is sharded over the data-parallel ranks; what is not sharded is replicated."""

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
    """What one rank holds at rest, in bytes."""

    param: int
    grad: int
    state: int


def bytes_at_rest(
    placement: Placement,
    *,
    ranks: int,
    shard_numel: int,
    param: torch.dtype,
    master: torch.dtype,
    reduce: torch.dtype,
    trainable: bool,
    state_tensors: int,
) -> BytesPerRank:
    """The table of the ZeRO stage for one bucket: what a rank holds between two steps, gradients not yet dropped.

    ``state`` counts the optimizer's tensors and, where parameters compute in another dtype, the masters. A master that
    has the compute dtype is the parameter itself, so it costs nothing where that is replicated. What has a single
    rank is never sharded, whatever the placement says.
    """
    numel, mixed = ranks * shard_numel, param != master
    masters = shard_numel * master.itemsize
    replicated = not placement.param or ranks == 1
    keeps_full_grad = not placement.grad and ranks > 1
    return BytesPerRank(
        param=numel * param.itemsize if replicated else 0 if mixed else masters,
        grad=(masters + (numel * reduce.itemsize if keeps_full_grad else 0)) if trainable else 0,
        state=(masters if mixed else 0) + (masters * state_tensors if trainable else 0),
    )
