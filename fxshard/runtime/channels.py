"""The process groups of one domain on this rank: for gathers, for reductions, for sums over replicas, and along the
tensor-parallel dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.domain import Domain
from fxshard.planner.parts import Piece
from fxshard.runtime.watchdog import failing


@dataclass(frozen=True)
class Channels:
    """Gathers, reductions and all-reduces over replicas, each in a group of their own, none of them the mesh's.

    Within a group ranks must start collectives in the same order. The order of each of the three follows from the
    model; how they interleave with each other, and with what the model sends itself, follows from durations, which
    differ between ranks whose batches do.
    """

    domain: Domain
    mesh: DeviceMesh | None = None
    shard: int = 0
    """Which of the shards this rank holds."""
    replica: int = 0
    """Which of its replicas this rank's is."""
    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    all_ranks: dist.ProcessGroup | None = None
    """All ranks, for what is not sharded; the same as ``reduce`` where there is one replica."""
    tensor: TensorParallel | None = None
    """The dimension along which ranks hold other parts of the same parameters, if there is one."""

    def reducing(self, plan: BucketPlan) -> dist.ProcessGroup | None:
        """The group that reduces a bucket's full gradients."""
        return self.reduce if plan.layout.ranks > 1 else self.all_ranks

    def counts(self, plan: BucketPlan, name: str) -> bool:
        """Whether this rank is the one of several with the same elements of a parameter that counts them, in a norm."""
        own_part = self.tensor is None or self.tensor.pieces[name].counts
        return own_part and self.replica == 0 and (plan.layout.ranks > 1 or self.shard == 0)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that stands for all where they hold the same."""
        return self.shard == 0 and self.replica == 0 and (self.tensor is None or self.tensor.rank == 0)

    def broadcast(self, value: torch.Tensor) -> None:
        """The value of the first rank goes to all: inside each replica, then from replica to replica."""
        for group in (self.gather, self.replicas):
            if group is not None:
                dist.broadcast(value, group=group, group_src=0)

    def all_reduce(
        self, value: torch.Tensor, operation: dist.ReduceOp.RedOpType, event: str, *, tensor: bool = True
    ) -> None:
        """Combine a small value over all ranks; without ``tensor``, over the data-parallel ones. ``event``: what to
        call this where it fails."""
        parts = self.tensor.group if self.tensor is not None and tensor else None
        for group in (self.gather, self.replicas, parts):
            if group is not None:
                with failing(event, dist.get_rank()):
                    dist.all_reduce(value, op=operation, group=group)


def connect(
    domain: Domain, mesh: DeviceMesh | None, plans: Sequence[BucketPlan], tensor: TensorParallel | None
) -> Channels:
    """Make the groups that the buckets of a domain need. Collective among its ranks."""
    if mesh is None or domain.ranks == 1:
        return Channels(domain, mesh, tensor=tensor)
    inner = mesh.ndim - 1
    outer = 0 if mesh.ndim == 2 else None
    # The mesh's own groups are the user's: the model may communicate in them, in an order that is not ours.
    shards = mesh.get_group(inner) if domain.shards > 1 else None
    gather, reduce = (_again(shards), _again(shards)) if shards is not None else (None, None)
    replicas = _again(mesh.get_group(outer)) if outer is not None and domain.replicas > 1 else None
    all_ranks = reduce if replicas is None else None
    if replicas is not None and any(plan.trainable and plan.layout.ranks == 1 for plan in plans):
        timeout = private.group_timeout(replicas)
        all_ranks = dist.new_group(domain_ranks(mesh), timeout=timeout, use_local_synchronization=True)
    return Channels(
        domain,
        mesh,
        mesh.get_local_rank(inner),
        mesh.get_local_rank(outer) if outer is not None else 0,
        gather,
        reduce,
        replicas,
        all_ranks,
        tensor,
    )


def connect_tensor_parallel(tensor: TensorParallel | None) -> TensorParallel | None:
    """With a group of its own, where there are several ranks. Collective among them."""
    if tensor is None or tensor.ranks == 1:
        return tensor
    return replace(tensor, group=_again(tensor.mesh.get_group(tensor.mesh.ndim - 1)))


def domain_ranks(mesh: DeviceMesh | None) -> list[int]:
    """The global ranks of a mesh, in its order."""
    if mesh is None:
        return []
    if mesh.ndim == 1:
        return dist.get_process_group_ranks(mesh.get_group())
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def shape_of(mesh: DeviceMesh) -> tuple[int, int, int]:
    """(shards, replicas, how many ranks apart neighbouring shards are): of two dimensions the first replicates."""
    if mesh.ndim == 2 and any((mesh.mesh.diff(dim=dim) < 0).any() for dim in (0, 1)):
        raise ConfigError(
            f"the mesh has ranks {mesh.mesh.tolist()}, which do not ascend along both dimensions: process groups have "
            "theirs in ascending order, so that replicas would hold different shards. Make it with init_device_mesh"
        )
    row = mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1))[0].tolist()
    return len(row), mesh.size(0) if mesh.ndim == 2 else 1, row[1] - row[0] if len(row) > 1 else 1


def _again(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks."""
    timeout = private.group_timeout(group)
    return dist.new_group(dist.get_process_group_ranks(group), timeout=timeout, use_local_synchronization=True)


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
