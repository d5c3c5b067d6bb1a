"""The part of a checkpoint on this rank: rows of parameters and optimizer state, under the plain model's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.checkpoint.ranks import Part
from fxshard.frontend.module import ShardedModule
from fxshard.frontend.state import places
from fxshard.optim.moments import Deferred, Unpacked
from fxshard.planner.state import state_shape
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.rows import Rows

MODEL, OPTIMIZER = "model", "optimizer.state"
NO_PARTS: Mapping[str, Part] = MappingProxyType({})


@dataclass(frozen=True)
class Held:
    """This rank's rows of one tensor: a parameter, a buffer, or the state of a parameter called ``field``.

    A DTensor cannot say where its rows lie when ranks hold uneven numbers of them, so this record does.
    """

    part: str
    names: tuple[str, ...]
    """The parameter's names in the model: more than one where it is tied."""
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the rows start in the whole tensor."""
    tensor: torch.Tensor
    """The rows themselves, in place: reading them saves, writing to them loads."""
    field: str = ""
    writes: bool = True
    """Whether this rank takes part in saving it; of what is replicated, the checkpoint picks one of the ranks."""
    deferred: Deferred | None = None
    """Where memory holds something else than a checkpoint does; ``tensor`` then has no memory, only a shape."""

    def now(self) -> torch.Tensor:
        """The rows, to be saved."""
        return self.tensor if self.deferred is None else self.deferred.read()

    def path(self, name: str) -> tuple[str, ...]:
        return (*self.part.split("."), name, *([self.field] if self.field else []))

    def key(self, name: str) -> str:
        return ".".join(self.path(name))


Parts = Mapping[str, Part]
"""By the pattern of ``groups=``: which part of what it names this rank has."""


def of_model(
    model: ShardedModule, parts: Parts = NO_PARTS, *, frozen: bool = True, loading: bool = False
) -> Iterator[Held]:
    """Parameters (masters, where there are any) and persistent buffers. Buffers are those of the first rank.

    ``frozen``: whether parameters that do not train are among them. ``parts``: if given, a name stands for what all
    ranks have under it, otherwise for what this one has. ``loading``: what an error speaks of.
    """
    keys: dict[int, list[str]] = {}
    values = {}
    for key, value in model._tensors().items():
        keys.setdefault(id(value), []).append(key)
        values[id(value)] = value
    for bucket, name, parameter in places(model._sharding.buckets):
        names = tuple(keys.pop(id(parameter)))
        if frozen or bucket.plan.trainable:
            at = bucket.offsets(name)
            held = Held(MODEL, names, tuple(parameter.shape), at, bucket.local(name))
            yield _among_all(held, parts.get(bucket.plan.domain.name), loading=loading)
    sharding = model._sharding
    first = {"": sharding.channels.is_first}
    first |= {bucket.plan.domain.name: bucket.channels.is_first for bucket in sharding.buckets}
    for identity, of_buffer in keys.items():
        buffer = private.local_part(values[identity]).detach()
        domain = sharding.domain_of(of_buffer[0]).name
        held = Held(MODEL, tuple(of_buffer), tuple(buffer.shape), (0,) * buffer.ndim, buffer, writes=first[domain])
        yield _among_all(held, parts.get(domain), loading=loading)


def _among_all(held: Held, part: Part | None, *, loading: bool = False) -> Held:
    """Where this rank's rows are among those of all groups of ranks, which follow one another: as experts that are
    stacked do, so that a model with more or fewer of them on a rank finds its own.
    """
    if part is None or part.count == 1:
        return held
    if not held.shape:
        cannot = (
            "what is loaded has one for all of them: give it a dimension, in the model and in what is loaded"
            if loading
            else "cannot be saved: give it a dimension"
        )
        raise ConfigError(
            f"{held.names[0]} is a single number, of which ranks have several because of groups=, and {cannot}"
        )
    rows = held.shape[0]
    shape, offset = (part.count * rows, *held.shape[1:]), part.index * rows + held.offsets[0]
    return replace(held, shape=shape, offsets=(offset, *held.offsets[1:]))


State = Mapping[torch.Tensor, Mapping[str, Any]]
"""The type of ``optimizer.state``: parameter → field → tensor."""


def of_optimizer(model: ShardedModule, state: State, parts: Parts) -> Iterator[Held]:
    """State tensors: those shaped like their parameter (this rank has the same rows of both), and scalars."""
    for bucket, name, parameter in places(model._sharding.buckets):
        of_one = state.get(parameter, {})
        if isinstance(of_one, Unpacked):
            found = _unpacked(bucket, name, parameter, of_one)
        else:
            found = (_state(bucket, name, parameter, field, value) for field, value in of_one.items())
        for held in found:  # all ranks have the same numbers: of steps, and what follows from them
            yield _among_all(held, parts.get(bucket.plan.domain.name)) if held.shape else held


def _unpacked(bucket: Bucket, name: str, parameter: torch.nn.Parameter, state: Unpacked) -> Iterator[Held]:
    """State in fewer bits or on the host, which a checkpoint holds as fp32, one after another."""
    for field in state:
        if field == "step":
            yield _state(bucket, name, parameter, field, state[field])
            continue
        rows = state.deferred(field)
        shapes = state_shape(field, parameter.shape), torch.empty(rows.shape, device="meta")
        yield Held(OPTIMIZER, (name,), shapes[0], rows.offsets, shapes[1], field, deferred=rows)


def empty_like_parameter(model: ShardedModule, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A state tensor for a parameter, sharded as it is."""
    bucket = next(bucket for bucket in model._sharding.buckets if name in bucket.plan.params)
    return bucket.wrap(torch.zeros(bucket.fragment(name).numel, dtype=dtype, device=bucket.device), name)


def parameter_names(model: ShardedModule) -> dict[int, str]:
    """Parameter (by identity) → the name it has in optimizer state."""
    return {id(parameter): name for _, name, parameter in places(model._sharding.buckets)}


def _state(bucket: Bucket, name: str, parameter: torch.nn.Parameter, field: str, value: object) -> Held:
    if not isinstance(value, torch.Tensor) or tuple(value.shape) not in (state_shape(field, parameter.shape), ()):
        raise ConfigError(
            f"optimizer state {field!r} of {name} is {_described(value)}; tensors of the parameter's shape "
            "and scalar tensors can be saved"
        )
    local = private.local_part(value)
    rows = private.wrapped(value) if local is not value else value
    # Replicas that share state hold fewer rows.
    at = rows.offsets if isinstance(rows, Rows) else bucket.offsets(name)
    return Held(OPTIMIZER, (name,), tuple(value.shape), at if value.shape else (), local.detach(), field)


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__}"
