"""Muon on tensor-parallel matrices: each is orthogonalized, whole, on one of the ranks that hold parts of it.

Which one that is, and what is sent, is planned (:mod:`fxshard.planner.parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxshard.planner.parts import Parts
from fxshard.runtime.engine import Engine, Sent
from fxshard.schedule.events import TENSOR

Orthogonal = Callable[[list[str], list[torch.Tensor]], list[torch.Tensor]]
"""Directions of whole matrices, by their names."""


class PartsExchange:
    """Parts of matrices on the way to their owners, and back. Collective: all ranks of the group give the same ones."""

    def __init__(self, engine: Engine, bucket: int, parts: Parts, updates: Sequence[torch.Tensor]) -> None:
        """Start sending ``updates``, this rank's parts, among the tensor-parallel ranks that share ``bucket``."""
        tensor = engine.buckets[bucket].tensor
        assert tensor is not None
        self._engine, self._bucket, self._parts, self._rank = engine, bucket, parts, tensor.rank
        sends = flat([updates[i] for i in parts.order], torch.float32, engine.device)
        self._sent = self._exchange(sends, parts.to_owners(), parts.from_each(self._rank))

    def directions(self, orthogonal: Orthogonal) -> list[torch.Tensor]:
        """The directions of this rank's parts, in bf16, in the order of the parts."""
        parts, ranks = self._parts, self._parts.group.ranks
        owned = [parts.members[i] for i in parts.owned(self._rank)]
        of_ranks = self._sent.wait().view(ranks, -1).split([part.numel for part in owned], dim=1)
        whole = [
            torch.cat([came.view(part.shape) for came in of_rank], part.dim)
            for part, of_rank in zip(owned, of_ranks, strict=True)
        ]
        found = orthogonal([part.name for part in owned], whole) if owned else []
        back = [
            direction.narrow(part.dim, rank * part.shape[part.dim], part.shape[part.dim])
            for rank in range(ranks)
            for part, direction in zip(owned, found, strict=True)
        ]
        sends = flat(back, torch.bfloat16, self._engine.device)
        returned = self._exchange(sends, parts.from_each(self._rank), parts.to_owners()).wait()
        sizes = [parts.members[i].numel for i in parts.order]
        by_position = dict(zip(parts.order, returned.split(sizes), strict=True))
        return [by_position[i].view(part.shape) for i, part in enumerate(parts.members)]

    def _exchange(self, sends: torch.Tensor, to: list[int], from_each: list[int]) -> Sent:
        return self._engine.exchange(self._bucket, sends, to, from_each, stream=TENSOR)


def flat(parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Tensors one after another, as they are sent."""
    if not parts:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat([part.reshape(-1).to(dtype) for part in parts])
