"""Muon on tensor-parallel matrices: each is orthogonalized, whole, on one of the ranks that hold parts of it.

All ranks of the tensor-parallel dimension hold parts of the same matrices, so each has the same ones to deal out. One
all-to-all there and one back move every part once, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxshard.plan.matrices import least_loaded, matrix_cost
from fxshard.plan.pieces import Piece
from fxshard.runtime.tensor_parallel import TensorParallel

Orthogonal = Callable[[list[int], list[torch.Tensor]], list[torch.Tensor]]
"""Directions of whole matrices, by their positions."""


def is_cut(piece: Piece) -> bool:
    """Whether a rank has less than whole matrices; experts that are dealt out to ranks are whole."""
    return piece.dim is not None and piece.dim >= len(piece.shape) - 2 and piece.parts > 1


def orthogonal_parts(
    tensor: TensorParallel, pieces: Sequence[Piece], updates: Sequence[torch.Tensor], orthogonal: Orthogonal
) -> list[torch.Tensor]:
    """The directions of this rank's parts of some matrices, in bf16. Collective: all ranks give the same matrices."""
    owners = _owners(pieces, tensor.ranks)
    owned = [i for i, owner in enumerate(owners) if owner == tensor.rank]
    own_numel = sum(updates[i].numel() for i in owned)
    to_owners = [
        sum(u.numel() for u, owner in zip(updates, owners, strict=True) if owner == r) for r in range(tensor.ranks)
    ]
    order = sorted(range(len(updates)), key=lambda i: owners[i])  # stable: within an owner, the order of the list
    sends = flat([updates[i] for i in order], torch.float32, updates[0].device)
    came = tensor.exchange(sends, to_owners, [own_numel] * tensor.ranks).view(tensor.ranks, own_numel)
    of_ranks = came.split([updates[i].numel() for i in owned], dim=1)
    wholes = [
        torch.cat([part.view(updates[i].shape) for part in parts], pieces[i].dim or 0)
        for i, parts in zip(owned, of_ranks, strict=True)
    ]
    directions = orthogonal(owned, wholes) if owned else []
    back = [
        part
        for rank in range(tensor.ranks)
        for i, direction in zip(owned, directions, strict=True)
        for part in [_of_rank(pieces[i], rank).of(direction)]
    ]
    returned = tensor.exchange(flat(back, torch.bfloat16, sends.device), [own_numel] * tensor.ranks, to_owners)
    parts = dict(zip(order, returned.split([updates[i].numel() for i in order]), strict=True))
    return [parts[i].view(update.shape) for i, update in enumerate(updates)]


def _owners(pieces: Sequence[Piece], ranks: int) -> list[int]:
    """Which rank orthogonalizes each matrix: the largest are dealt first, each to the rank with the least to do."""
    owners, loads = [0] * len(pieces), [0.0] * ranks
    for i in sorted(range(len(pieces)), key=lambda i: -matrix_cost(pieces[i].shape)):
        owners[i] = least_loaded(loads)
        loads[owners[i]] += matrix_cost(pieces[i].shape)
    return owners


def _of_rank(piece: Piece, rank: int) -> Piece:
    return Piece(piece.shape, piece.dim, piece.parts, rank)


def flat(parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Tensors one after another, as they are sent."""
    if not parts:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat([part.reshape(-1).to(dtype) for part in parts])
