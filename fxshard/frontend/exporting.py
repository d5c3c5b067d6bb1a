"""Whole tensors out of a sharded model one bucket at a time, and safetensors files that are filled with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.frontend.sharding import Sharding
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.parameter_methods import whole_parameters

INDEX = "model.safetensors.index.json"


def refuse_groups(sharding: Sharding) -> None:
    """Raise where a name stands for different parameters on different ranks: a file would have those of the first."""
    names = [bucket.plan.params[0] for bucket in sharding.buckets if bucket.plan.domain.ranks < sharding.ranks]
    if names:
        raise ConfigError(
            f"{names[0]} is another parameter on other ranks, because of groups=, and files by names would have those "
            "of the first rank alone: fxshard.save writes them all"
        )


def whole_tensors(
    state: Mapping[str, torch.Tensor], buckets: Sequence[Bucket]
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Every tensor of a state dict with its names (several where it is tied), gathered bucket by bucket. Collective."""
    names: dict[int, list[str]] = {}
    for key, value in state.items():
        names.setdefault(id(value), []).append(key)
    for bucket in buckets:
        for parameter, view in zip(bucket.params, whole_parameters(bucket), strict=True):
            yield tuple(names.pop(id(parameter))), view
    for value in state.values():
        if id(value) in names:
            yield tuple(names.pop(id(value))), private.local_part(value).detach()


class SafetensorsWriter:
    """Fills one file after the other; their final names are known when all are written."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._total = self._size = 0

    def add(self, name: str, value: torch.Tensor) -> None:
        if self._pending and self._size + value.nbytes > self._file_bytes:
            self._flush()
        self._pending[name] = value.contiguous().to("cpu", copy=True)  # a file must not hold two views of one memory
        self._size += value.nbytes
        self._total += value.nbytes

    def close(self) -> None:
        self._flush()
        count = len(self._files)
        names = (
            [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
            if count > 1
            else ["model.safetensors"]
        )
        for i, name in enumerate(names):
            (self._folder / f"{i}.safetensors").rename(self._folder / name)
        if count > 1:
            index = {key: name for name, keys in zip(names, self._files, strict=True) for key in keys}
            content = {"metadata": {"total_size": self._total}, "weight_map": index}
            (self._folder / INDEX).write_text(json.dumps(content, indent=1))

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._pending, self._folder / f"{len(self._files)}.safetensors", metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._size = {}, 0
