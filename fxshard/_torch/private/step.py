"""What a training step calls of torch: kernels over lists of tensors, collectives, DTensors of uneven shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from fxshard._torch.errors import StateError


def fused_adamw(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
    maximize: bool,
    refused: torch.Tensor | None,
) -> None:
    """The kernel that ``torch.optim.AdamW(fused=True)`` calls, for CPU and CUDA. torch 2.11, 2.13.

    It writes nothing if the fp32 number ``refused``, on the device of the tensors, is one.
    """
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr,  # type: ignore[arg-type]
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=maximize,
        found_inf=refused,
    )


def foreach_lerp_(tensors: list[torch.Tensor], ends: list[torch.Tensor], weight: float) -> None:
    """Each tensor moves ``weight`` of the way to its end, in one launch. torch 2.11, 2.13."""
    torch._foreach_lerp_(tensors, ends, weight)


def foreach_lerp(tensors: list[torch.Tensor], ends: list[torch.Tensor], weight: float) -> list[torch.Tensor]:
    """``foreach_lerp_`` out of place. torch 2.11, 2.13."""
    return list(torch._foreach_lerp(tensors, ends, weight))


def foreach_mul_(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all tensors in one launch. torch 2.11, 2.13."""
    torch._foreach_mul_(tensors, factor)


def foreach_norm(tensors: list[torch.Tensor], ord: float) -> list[torch.Tensor]:
    """The norm of each tensor, in few launches. torch 2.11, 2.13."""
    return list(torch._foreach_norm(tensors, ord=ord))


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    a_recipe: F.ScalingType,
    b_scales: torch.Tensor,
    b_recipe: F.ScalingType,
    *,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_mm``, which has no ``out``. torch 2.11, 2.13."""
    recipes = [int(a_recipe.value)], [int(b_recipe.value)]
    return torch._scaled_mm_v2(a, b, [a_scales], recipes[0], [], [b_scales], recipes[1], [], None, dtype, out=out)


def all_gather(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """``all_gather_into_tensor``, which torch 2.13 renamed to ``all_gather_single``."""
    renamed = getattr(dist, "all_gather_single", None)
    return (renamed or dist.all_gather_into_tensor)(output, shard, group=group, async_op=async_op)


def reduce_scatter(
    output: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """``reduce_scatter_tensor``, which torch 2.13 renamed to ``reduce_scatter_single``."""
    renamed = getattr(dist, "reduce_scatter_single", None)
    return (renamed or dist.reduce_scatter_tensor)(output, full, op=op, group=group, async_op=async_op)


class UnevenDTensor:
    """Makes DTensors of one global shape whose ranks may hold any number of rows. torch 2.11, 2.13.

    Of the dimensions of ``mesh`` the last shards rows, the others replicate. Where a tensor-parallel dimension comes
    after them, ``tensor_dim`` is what it cuts, None if nothing: the placements are those that FSDP2 has.

    ``DTensor.from_local`` does the same through an autograd function, ten times slower: gradients are wrapped every
    step, so the constructor is called with the specification that ``from_local`` made once.
    """

    def __init__(
        self,
        local: torch.Tensor,
        mesh: dist.DeviceMesh,
        shape: torch.Size,
        *,
        sharded: bool,
        tensor_parallel: bool,
        tensor_dim: int | None,
    ) -> None:
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.placement_types import Placement, _StridedShard

        stride = torch.empty(shape, device="meta").stride()
        inner: list[Placement] = []
        rows: Placement = Shard(0) if sharded else Replicate()
        if tensor_parallel:
            inner = [Replicate() if tensor_dim is None else Shard(tensor_dim)]
            parts = mesh.size(mesh.ndim - 1)
            if sharded and tensor_dim == 0 and parts > 1:
                rows = _StridedShard(0, split_factor=parts)  # cut by the tensor-parallel dimension first
        placements = [*[Replicate()] * (mesh.ndim - 1 - len(inner)), rows, *inner]
        example = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        self._make, self._spec = DTensor, example._spec
        self._blank = local.new_empty(0)

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        # A DTensor takes over its local tensor's storage offset, and with one other than 0 it can be neither copied nor
        # saved. Rows lie anywhere in their shard, so it is made around an empty tensor first.
        wrapped = self._make(self._blank, self._spec, requires_grad=False)
        wrapped._local_tensor = local
        return wrapped


class ShardOfRows(Shard):
    """``Shard(0)``, to which it is equal, of which ranks hold given numbers of rows. ``set_state_dict`` of torch asks
    for these to cut a whole tensor (``broadcast_from_rank0=True``). torch 2.11, 2.13."""

    counts: tuple[int, ...] = ()

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        if sum(self.counts) != curr_local_size:
            raise StateError(_CANNOT_CUT)
        return self.counts[rank], sum(self.counts[:rank])


class StridedRows(_StridedShard):
    """The same of rows that a tensor-parallel dimension has cut first: torch cannot ask for these."""

    def _local_shard_size_and_offset(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError(_CANNOT_CUT)


_CANNOT_CUT = (
    "torch would cut a whole tensor by its own rule, but ranks hold uneven numbers of these rows: give whole tensors "
    "to load_state_dict of the model or the optimizer, on every rank, or use fxshard.save and fxshard.load"
)


def shard_of_rows(placement: Any, counts: tuple[int, ...] | None) -> Any:
    """A placement that cuts rows, for ranks that hold ``counts`` of them. torch 2.11, 2.13."""
    if isinstance(placement, _StridedShard):
        return StridedRows(placement.dim, split_factor=placement.split_factor)
    made = ShardOfRows(placement.dim)
    made.counts = counts or ()
    return made


def is_strided(placement: Any) -> bool:
    """Whether a placement cuts what a later dimension of the mesh has cut already. torch 2.11, 2.13."""
    return isinstance(placement, _StridedShard)


def as_dtensor(tensor: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """A DTensor of the class itself around the rows of one of a subclass, or around others. torch 2.11, 2.13."""
    from torch.distributed.tensor import DTensor

    rows = tensor._local_tensor if rows is None else rows  # type: ignore[attr-defined]
    made = DTensor(rows.new_empty(0), tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
    made._local_tensor = rows
    return made


class StorageReference:
    """A weak reference to the storage of a tensor: it lives as long as any view of it. torch 2.11, 2.13."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._reference: Any = StorageWeakRef(tensor.untyped_storage())

    def expired(self) -> bool:
        return bool(self._reference.expired())

    def is_of(self, tensor: torch.Tensor) -> bool:
        return bool(self._reference.cdata == memory_of(tensor))


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same bytes with a storage of its own, which keeps the first one's alive. torch 2.11, 2.13."""
    from torch.utils.dlpack import from_dlpack, to_dlpack

    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # DLPack does not know every small type
    # A capsule, and no stream: there is nothing to wait for.
    return from_dlpack(to_dlpack(raw)).view(tensor.dtype)


def memory_of(value: torch.Tensor) -> int:
    """The same number for tensors that share memory, also for fake ones, which have none. torch 2.11, 2.13."""
    return value.untyped_storage()._cdata


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one tensor is a view of the other, or both of a third; fake tensors too. torch 2.11, 2.13."""
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]
