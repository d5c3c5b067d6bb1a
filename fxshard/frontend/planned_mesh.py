"""A mesh that is only planned for: torch's fake process group, in which this process is the first of all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard._torch import private
from fxshard._torch.errors import ConfigError, StateError
from fxshard.frontend.groups import is_count, meshes_of
from fxshard.planner.domain import Domain, Reduction, data_parallel
from fxshard.runtime.channels import shape_of

MeshShape = Mapping[str, int]
"""{dimension: ranks along it}, the outermost first, as ``init_device_mesh`` takes them."""

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module | None]
"""Cuts a model for a mesh, in place or as another one: ``lambda model, mesh: parallelize_module(...)``."""

DATA_PARALLEL = (("dp_replicate", "dp_shard"), ("dp",))
"""Dimensions that are data-parallel if a mesh has them; a mesh that has neither is data-parallel as a whole."""

CONTEXT_PARALLEL = "cp"
"""The dimension along which sequences are cut: parameters are sharded over it, too."""


@dataclass(frozen=True)
class PlannedMesh:
    """The mesh, and its data-parallel part: what a run would give to ``compile`` as ``mesh=``."""

    mesh: DeviceMesh
    data_parallel: DeviceMesh
    device: str

    def domains(self, reduction: Reduction, groups: Mapping[str, Any] | None) -> list[Domain]:
        """The model's own ranks, then those of ``groups``, whose values are dimensions of the mesh."""
        shards, replicas, stride = shape_of(self.data_parallel)
        own = data_parallel(shards, replicas, reduction, self.device, stride)
        named = {pattern: self._dimension(pattern, name) for pattern, name in (groups or {}).items()}
        others = [domain for domain, _ in meshes_of(named, self.data_parallel, own).values()]
        return [own, *(replace(domain, device=self.device) for domain in others)]

    def _dimension(self, pattern: str, name: Any) -> DeviceMesh:
        names = self.mesh.mesh_dim_names or ()
        if name not in names:
            raise ConfigError(
                f"groups[{pattern!r}]={name!r}: with mesh=, expected one of its dimensions, "
                f"{', '.join(map(repr, names))}"
            )
        return self.mesh[name]


@contextmanager
def planned_mesh(shape: MeshShape, device: str) -> Iterator[PlannedMesh]:
    """Process groups for a mesh, in this process alone, for the block. ``device``: how groups are named."""
    if not shape or not all(map(is_count, shape.values())):
        raise ConfigError(f'mesh={shape!r}: expected the ranks along each dimension, such as {{"dp": 128, "tp": 8}}')
    if dist.is_initialized():
        raise StateError(
            "fxshard.plan(mesh=...) makes torch's fake process group, and this process has one already: plan before "
            "init_process_group, or in a process of its own"
        )
    with private.fake_ranks(math.prod(shape.values())):
        # On the CPU, whatever it is planned for: parameters that are cut for it stay where planning has them.
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        yield PlannedMesh(mesh, _data_parallel(mesh), device)


def _data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    for dimensions in DATA_PARALLEL:
        if set(dimensions) <= set(names):
            if CONTEXT_PARALLEL in names:
                return private.flattened(mesh, dimensions, CONTEXT_PARALLEL)
            return mesh[dimensions] if len(dimensions) > 1 else mesh[dimensions[0]]
    return mesh if mesh.ndim == 1 else init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("shard",))


def parallelized(model: nn.Module, parallelize: Parallelize | None, mesh: DeviceMesh) -> nn.Module:
    """A copy of the model, cut for the mesh; its parameters are on the meta device."""
    if parallelize is None:
        return model
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    own = copy.deepcopy(model, memo)
    given = parallelize(own, mesh)
    return own if given is None else given
