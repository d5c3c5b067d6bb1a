"""ZeRO stages as placements: where parameters, gradients and optimizer state live. One table, no code paths."""

from __future__ import annotations

from dataclasses import dataclass


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
    placement: Placement, *, numel: int, shard_numel: int, param_size: int, master_size: int, state_tensors: int
) -> BytesPerRank:
    """The table of the ZeRO stage for one bucket: what a rank holds between two steps.

    ``state`` counts the optimizer's tensors and, where parameters compute in another dtype, the masters. A master that
    has the compute dtype is the parameter itself, so it costs nothing beside a replicated one.
    """
    mixed = param_size != master_size
    local = shard_numel if placement.state else numel
    masters = local * master_size
    param = 0 if placement.param and mixed else masters if placement.param else numel * param_size
    grad = shard_numel * master_size if placement.state else 0
    if not placement.grad:
        grad += numel * master_size
    state = local * master_size * state_tensors + (masters if mixed else 0)
    return BytesPerRank(param, grad, state)
