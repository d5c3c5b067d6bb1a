"""The tensor-parallel dimension of a model's ranks: along it, ranks hold other parts of the same parameters.

Data parallelism shards the parts. Ranks that differ in this dimension only have the same buckets over other elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch import private
from fxshard.plan.pieces import Piece
from fxshard.runtime.watchdog import failing


@dataclass(frozen=True)
class TensorParallel:
    """``mesh``: of all ranks of the model, the tensor-parallel dimension last. ``pieces``: of each parameter."""

    mesh: DeviceMesh
    pieces: Mapping[str, Piece]
    placed: frozenset[str]
    """The parameters that are DTensors; others are on this dimension's ranks alike, as plain tensors."""
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def ranks(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1)

    def lines(self) -> list[str]:
        """What each parameter is cut along, for ranks to compare."""
        cut = {name: piece for name, piece in self.pieces.items() if piece.dim is not None}
        return [f"{name}: {piece.shape} in {piece.parts} parts along {piece.dim}" for name, piece in cut.items()]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """What each rank of the dimension has in the place of ``local``, stacked. Collective."""
        gathered = local.new_empty((self.ranks, *local.shape))
        if self.group is None:
            return gathered.copy_(local)
        with failing("all_gather of tensor-parallel parts", dist.get_rank()):
            private.all_gather(gathered.view(-1), local.contiguous().view(-1), self.group, async_op=False)
        return gathered

    def whole(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A parameter, or what is shaped like one, from the parts of all ranks of the dimension. Collective."""
        dim = self.pieces[name].dim
        return local if dim is None else torch.cat(self.gather(local).unbind(), dim)

    def broadcast(self, value: torch.Tensor) -> None:
        """The value of the first rank goes to all of the dimension."""
        if self.group is not None:
            dist.broadcast(value, group=self.group, group_src=0)
