"""Models whose parameters are DTensors on a tensor-parallel mesh: what is found in them, and what cannot be sharded."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.planner.model_groups import labelled
from fxshard.planner.parts import Cuts, Piece, Whole
from fxshard.planner.precision import Precision
from fxshard.planner.quantized import Quantized
from fxshard.runtime.channels import TensorParallel


def find_tensor_parallel(model: nn.Module, mesh: DeviceMesh | None) -> TensorParallel | None:
    """The tensor-parallel dimension of a model's parameters, checked; None where none of them is a DTensor.

    ``mesh``: of the data-parallel ranks.
    """
    placed = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if not placed:
        return None
    name, first = next(iter(placed.items()))
    if mesh is None:
        raise ConfigError(
            f"{name!r} is a DTensor with placements {first.placements}: pass the data-parallel dimension of its mesh, "
            'fxshard.compile(model, mesh=mesh["dp"]); one of size 1 will do'
        )
    ranks = _joined(name, first.device_mesh, mesh)
    for other, parameter in placed.items():
        if parameter.device_mesh != first.device_mesh:
            raise ConfigError(
                f"{name!r} and {other!r} are DTensors on different meshes ({first.device_mesh} and "
                f"{parameter.device_mesh}): one tensor-parallel dimension can be combined with data parallelism"
            )
    for other, buffer in model.named_buffers():
        if isinstance(buffer, DTensor) and not all(placement.is_replicate() for placement in buffer.placements):
            raise ConfigError(
                f"the buffer {other!r} is a DTensor with placements {buffer.placements}: buffers are the same on all "
                "ranks; keep this rank's part as a plain parameter, or make the buffer Replicate()"
            )
    index, parts = first.device_mesh.get_local_rank(), first.device_mesh.size()
    pieces = {name: _piece(name, parameter, index, parts) for name, parameter in model.named_parameters()}
    return TensorParallel(ranks, pieces, frozenset(placed))


def cut_matrices(model: nn.Module, matrices: Collection[str]) -> Cuts | None:
    """Which of Muon's matrices are cut over a tensor-parallel dimension; its mesh alone is looked at, no other rank."""
    placed = {name: p for name, p in model.named_parameters() if name in matrices and isinstance(p, DTensor)}
    for name, parameter in placed.items():
        _check_dimensions(name, parameter.device_mesh)
    pieces = {name: _piece(name, parameter, 0, parameter.device_mesh.size()) for name, parameter in placed.items()}
    cut = {name: piece for name, piece in pieces.items() if piece.cuts_matrices}
    if not cut:
        return None
    (group,) = labelled([private.group_ranks(placed[next(iter(cut))].device_mesh.get_group())]).values()
    return Cuts(group, tuple(Whole(name, piece.shape) for name, piece in cut.items()))


def _joined(name: str, tensor: DeviceMesh, data: DeviceMesh) -> DeviceMesh:
    """All ranks of the model: the data-parallel dimensions, then the tensor-parallel one."""
    _check_dimensions(name, tensor)
    try:
        if tensor.mesh_dim_names is None or data.mesh_dim_names is None:
            raise RuntimeError("a mesh without names is no part of another")
        return private.joined_meshes(data, tensor)
    except RuntimeError as error:
        raise ConfigError(
            f"{name!r} is a DTensor over ranks {_ranks(tensor)}, and mesh= has ranks {_ranks(data)} ({error}): both "
            'must be dimensions of one mesh, init_device_mesh(device, (data, tensor), mesh_dim_names=("dp", "tp")), '
            'with parallelize_module(model, mesh["tp"], ...) and fxshard.compile(model, mesh=mesh["dp"])'
        ) from error


def _check_dimensions(name: str, tensor: DeviceMesh) -> None:
    if tensor.ndim != 1:
        raise ConfigError(
            f"{name!r} is a DTensor on a mesh of {tensor.ndim} dimensions {tensor.mesh_dim_names or ''}: give "
            'parallelize_module the tensor-parallel dimension alone (mesh["tp"]), and fxshard.compile the others'
        )


def _ranks(mesh: DeviceMesh) -> list[int]:
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def _piece(name: str, parameter: nn.Parameter, index: int, parts: int) -> Piece:
    shape = tuple(parameter.shape)
    placement = parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
    if placement.is_replicate():
        return Piece(shape, None, parts, index)
    if not private.is_plain_shard(placement):
        raise ConfigError(
            f"{name!r} has the placement {placement} on the tensor-parallel mesh: expected Shard or Replicate"
        )
    dim: int = placement.dim % len(shape)  # type: ignore[attr-defined]
    if shape[dim] % parts:
        raise ConfigError(
            f"{name!r} of shape {list(shape)} is cut along dimension {dim} into {parts} tensor-parallel parts, which "
            f"are not equal: choose sizes that {parts} divides, or leave this module out of parallelize_module"
        )
    return Piece(shape, dim, parts, index)


def refuse_breaks(model: nn.Module) -> None:
    """Code between graphs would need the gathered parts as DTensors, and gradients of them."""
    placed = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if placed is not None:
        raise ConfigError(
            f"fullgraph=False, and {placed!r} is a DTensor: a tensor-parallel model is captured as one graph; mend the "
            "breaks and leave fullgraph=True"
        )


def refuse_combinations(tensor: TensorParallel, precision: Precision | None) -> None:
    """What is not known to work on parameters that are parts."""
    if isinstance(precision, Quantized):
        kind = type(precision).__name__
        raise ConfigError(
            f"precision={kind}(...) and tensor-parallel parameters ({min(tensor.placed)!r}) do not work together: "
            "scales of a weight would need the parts of all tensor-parallel ranks; use Precision(...)"
        )
