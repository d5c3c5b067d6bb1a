"""Parameters that live on other ranks than the rest: the experts of an expert-parallel model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeGuard

from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch.errors import ConfigError
from fxshard.planner.domain import Domain, DomainOf
from fxshard.runtime.channels import domain_ranks, shape_of


@dataclass(frozen=True)
class Group:
    """The ranks that hold the same parameters, and what their summed gradients are divided by.

    ``divisor=None`` takes that of the other parameters: the number of data-parallel ranks. An expert's gradient has
    been added up over the tokens of all ranks that send to it; divided by that number it is the mean over the global
    batch.

    >>> fxshard.compile(model, groups={"*.experts.*": fxshard.Group(mesh["ep_dp"], divisor=64)})
    """

    mesh: DeviceMesh
    divisor: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            raise ConfigError(f"Group(mesh={self.mesh!r}): expected a DeviceMesh")
        if self.mesh.ndim > 2:
            raise ConfigError(f"Group(mesh=...) has {self.mesh.ndim} dimensions; expected one, or replicate × shard")
        if self.divisor is not None and not self.divisor > 0:
            raise ConfigError(f"Group(divisor={self.divisor!r}): expected a number above 0, or None")


Groups = Mapping[str, DeviceMesh | Group]


def meshes_of(groups: Groups | None, mesh: DeviceMesh | None, own: Domain) -> dict[str, tuple[Domain, DeviceMesh]]:
    """The domain and the mesh of each pattern. Every mesh lies within that of the model."""
    found = {}
    members = set(domain_ranks(mesh))
    for pattern, value in (groups or {}).items():
        group = value if isinstance(value, Group) else Group(value)
        foreign = sorted(set(domain_ranks(group.mesh)) - members)
        if foreign:
            raise ConfigError(
                f"groups[{pattern!r}] has ranks {foreign}, which are not data-parallel ranks of the model "
                f"({sorted(members)}); pass mesh= with all of them"
            )
        shards, replicas, stride = shape_of(group.mesh)
        divisor = own.divisor if group.divisor is None else group.divisor
        found[pattern] = (Domain(shards, replicas, divisor, pattern, group.mesh.device_type, stride), group.mesh)
    return found


def is_count(number: object) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def planned_domains(sizes: Mapping[str, int] | None, own: Domain) -> list[Domain]:
    """The same without process groups: how many ranks hold the same parameters, of those of the model."""
    found = []
    for pattern, size in (sizes or {}).items():
        if not is_count(size) or own.ranks % size:
            raise ConfigError(
                f"groups[{pattern!r}]={size!r}: expected how many ranks hold the same of these parameters, "
                f"a divisor of world_size={own.ranks}"
            )
        found.append(replace(own, shards=size, replicas=1, name=pattern, stride=own.ranks // size))
    return found


def domain_by_name(domains: Iterable[Domain], own: Domain) -> DomainOf:
    """The domain of a parameter (or buffer): that of the first pattern that matches its name."""
    chosen = list(domains)

    def domain_of(name: str) -> Domain:
        return next((domain for domain in chosen if fnmatchcase(name, domain.name)), own)

    return domain_of


def check_patterns(domains: Iterable[Domain], names: Iterable[str], domain_of: DomainOf) -> None:
    """A pattern that no parameter falls under is a mistake: its parameters would be reduced over the wrong ranks."""
    names = list(names)
    used = {domain_of(name).name for name in names}
    for domain in domains:
        if domain.name not in used:
            raise ConfigError(
                f"groups[{domain.name!r}] matches no parameter (or an earlier pattern takes them); "
                f"parameters are named like {', '.join(map(repr, names[:3]))}"
            )
