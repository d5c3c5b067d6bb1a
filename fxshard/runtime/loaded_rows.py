"""Sharded tensors of state dicts, cut as the model is that loads them, whatever rows ranks had when they were saved.

``torch.save`` writes DTensors of torch's class, which do not know which rows they have where ranks hold uneven numbers
of them. Their process groups are those of the run that saved them: in another one they are gone, or others by the same
name. So ranks exchange what they have over the groups of the model, and put it together as the placements say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.runtime.uneven_rows import UnevenRows, uneven

Parts = dict[tuple[int, ...], torch.Tensor]
"""What ranks hold, by their coordinates in a mesh."""


def with_rows(own: torch.Tensor, given: Any) -> Any:
    """A DTensor that can be copied into a model's own; a whole tensor, if it is cut in another way. Collective.

    If all ranks have as many rows as they hold of ``own``, in the same order, these are the rows.
    """
    if not isinstance(given, DTensor):
        return given
    _check_ranks(own, given)
    if not isinstance(own, DTensor) or _has_rows_of(own, given):
        return given
    mesh, of_saved = own.device_mesh, given.device_mesh.mesh
    placements = private.as_dtensor(given).placements  # type: ignore[attr-defined]
    local = private.wrapped(given).detach().as_subclass(torch.Tensor).to(mesh.device_type)
    alike = placements == own.placements and torch.equal(of_saved, mesh.mesh)
    differs, most = _largest(mesh, [not alike or local.shape != private.wrapped(own).shape, local.nbytes])
    if not differs:
        rows = private.as_dtensor(own, local)
        return uneven(rows, own._cut) if isinstance(own, UnevenRows) else rows
    of_ranks = _of_all_ranks(mesh, local, most)
    parts = {at: of_ranks[int(of_saved[at])] for at in _coordinates(of_saved)}
    for over_replicas in (False, True):
        whole = _joined(parts, placements, over_replicas=over_replicas)
        if whole.shape == given.shape:
            return whole
    raise StateError(
        f"a tensor of this state dict has the shape {tuple(given.shape)}, and what ranks have of it makes "
        f"{tuple(whole.shape)}: were the files of some ranks mixed up with others? fxshard.save keeps them together"
    )


def _has_rows_of(own: DTensor, given: DTensor) -> bool:
    """Whether every rank knows without asking that it was given the rows that it holds."""
    return (
        isinstance(own, UnevenRows)
        and isinstance(given, UnevenRows)
        and own._cut == given._cut
        and own._cut.counts is not None
        and own.device_mesh == given.device_mesh
        and own.placements == given.placements
    )


def _check_ranks(own: torch.Tensor, given: DTensor) -> None:
    """Raise, on every rank alike, if rows of ``given`` are held by ranks of an earlier run, or by others than here."""
    of_given = {*given.device_mesh.mesh.flatten().tolist()}
    world = dist.get_world_size() if dist.is_initialized() else 1
    here = {*own.device_mesh.mesh.flatten().tolist()} if isinstance(own, DTensor) else {*range(world)}
    other = isinstance(own, DTensor) and of_given != here
    if other or max(of_given) >= world:
        raise StateError(
            f"a tensor of this state dict has the rows of one of {len(of_given)} ranks, and here are {len(here)}"
            f"{' others' if len(of_given) == len(here) else ''}: the rest is not in it. Give whole tensors "
            "(full_state_dict() where it is saved), or keep sharded ones by torch.distributed.checkpoint, which loads "
            "them on any number of ranks"
        )


def _largest(mesh: DeviceMesh, numbers: Sequence[int]) -> list[int]:
    """The largest of each number, over all ranks of a mesh. Collective."""
    found = torch.tensor([int(number) for number in numbers], device=mesh.device_type)
    for group in mesh.get_all_groups():
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return found.tolist()


def _of_all_ranks(mesh: DeviceMesh, local: torch.Tensor, most: int) -> dict[int, torch.Tensor]:
    """What each rank has, by its number. ``most``: bytes that a rank has. Collective."""
    shapes = _gathered(mesh, torch.tensor(local.shape, device=local.device, dtype=torch.int64)).tolist()
    sent = torch.zeros(most, dtype=torch.uint8, device=local.device)
    sent[: local.nbytes] = local.reshape(-1).view(torch.uint8)
    found = {}
    for rank, shape, came in zip(mesh.mesh.flatten().tolist(), shapes, _gathered(mesh, sent), strict=True):
        size = torch.Size(shape)
        found[rank] = came[: size.numel() * local.element_size()].clone().view(local.dtype).view(size)
    return found


def _gathered(mesh: DeviceMesh, value: torch.Tensor) -> torch.Tensor:
    """A vector of every rank of a mesh, in the order in which the mesh lists them. Collective."""
    length = value.numel()
    for group in reversed(mesh.get_all_groups()):
        into = value.new_empty(group.size() * value.numel())
        private.all_gather(into, value, group, async_op=False)
        value = into
    return value.view(mesh.size(), length)


def _coordinates(ranks: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(at) for at in torch.ones_like(ranks).nonzero().tolist()]


def _joined(parts: Parts, placements: Sequence[Placement], *, over_replicas: bool) -> torch.Tensor:
    """The whole tensor. ``over_replicas``: whether the first dimension of the mesh, where it replicates, has parts of
    the same rows, one after another.

    A dimension of the mesh that cut what others had cut is joined before them.
    """
    shared = {0} if over_replicas and placements[0].is_replicate() else set()
    for i in sorted(range(len(placements)), key=lambda i: (i not in shared, not private.is_strided(placements[i]), -i)):
        parts = _without(parts, i, 0 if i in shared else getattr(placements[i], "dim", None))
    (whole,) = parts.values()
    return whole


def _without(parts: Parts, i: int, dim: int | None) -> Parts:
    """Parts that differ in one coordinate, put together along ``dim``; None: they are all the same."""
    found: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for at in sorted(parts):
        found.setdefault((*at[:i], 0, *at[i + 1 :]), []).append(parts[at])
    return {at: each[0] if dim is None or not each[0].ndim else torch.cat(each, dim) for at, each in found.items()}
