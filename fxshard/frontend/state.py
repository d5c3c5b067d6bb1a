"""Tensors of a sharded model: where they lie, whole ones put together from all ranks, and what they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.optim.sharded import ShardedOptimizer
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.parameter_methods import whole_parameters


def places(buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, str, nn.Parameter]]:
    """Every parameter with its bucket and its name there."""
    for bucket in buckets:
        for name, parameter in bucket.named():
            yield bucket, name, parameter


def place_of(buckets: Sequence[Bucket]) -> dict[int, tuple[Bucket, str]]:
    """The bucket of every parameter, and its name there, by the parameter's id."""
    return {id(parameter): (bucket, name) for bucket, name, parameter in places(buckets)}


def without_extra(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a state dict, without what ``get_extra_state()`` of modules returned."""
    return {key: value for key, value in state.items() if not is_extra(key)}


def is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == "_extra_state"


def whole(state: Mapping[str, torch.Tensor], buckets: Sequence[Bucket]) -> dict[str, torch.Tensor]:
    """A state dict of parameters and buffers as whole tensors, on the CPU of every rank. A collective call."""
    full = {
        id(parameter): value.cpu().clone()
        for bucket in buckets
        for parameter, value in zip(bucket.params, whole_parameters(bucket), strict=True)
    }
    return {
        key: full[id(value)] if id(value) in full else private.local_part(value).detach().cpu().clone()
        for key, value in state.items()
    }


def bytes_at_rest(buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes this rank holds between steps, counted from the storages that exist: param, grad, state, and on its host,
    where optimizer state is there."""
    sizes = {what: sum(bucket.bytes_at_rest()[what] for bucket in buckets) for what in ("param", "grad", "state")}
    if isinstance(optimizer, ShardedOptimizer):
        moments = optimizer.state_bytes()
        sizes["state"] += moments["device"]
        return {**sizes, "host": moments["host"]} if moments["host"] else sizes
    storages: dict[int, int] = {}
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                storage = private.local_part(value).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    sizes["state"] += sum(storages.values())
    return sizes


class ParameterIdentity:
    """Looked at before every forward: two lists, compared as a whole."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._names = [name for _, name, _ in places(buckets)]
        self._parameters = [parameter for _, _, parameter in places(buckets)]
        self._trained = [bucket.plan.trainable for bucket, _, _ in places(buckets)]
        self._storages = [private.storage_address(parameter) for parameter in self._parameters]

    def check(self) -> None:
        """Raise ``StateError`` if a parameter is trained that was frozen, or its memory was replaced."""
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            self._refuse_trained()
        if [private.storage_address(parameter) for parameter in self._parameters] != self._storages:
            self._refuse_replaced()

    def _refuse_trained(self) -> None:
        for name, parameter, trained in zip(self._names, self._parameters, self._trained, strict=True):
            if parameter.requires_grad != trained:
                raise StateError(
                    f"{name!r} was {'trained' if trained else 'frozen'} when the model was sharded; "
                    "set requires_grad on the plain model, before fxshard.compile"
                )

    def _refuse_replaced(self) -> None:
        for name, parameter, storage in zip(self._names, self._parameters, self._storages, strict=True):
            if private.storage_address(parameter) != storage:
                raise StateError(
                    f"{name!r} was given other memory (parameter.data = ...), but a sharded parameter is a view of its "
                    "bucket, and that was not changed: write values with parameter.copy_() below torch.no_grad(), or "
                    "with load_state_dict; this model cannot be used any more"
                )
