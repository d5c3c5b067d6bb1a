"""The tree of a plain model, mirrored: modules of the same names in which sharded parameters stand for hollow ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

from torch import nn


class Mirror(nn.Module):
    """Stands where a submodule of the plain model stood, and holds its sharded parameters."""

    _original: nn.Module

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_original", original)  # no submodule: its parameters are hollow

    def train(self, mode: bool = True) -> Self:
        self._original.train(mode)
        return super().train(mode)

    def _get_name(self) -> str:
        return self._original._get_name()


class _MirrorList(Mirror):
    """A mirror of something that is indexed by number."""

    def __getitem__(self, index: int) -> nn.Module:
        return list(self._modules.values())[index]  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]


def mirror(source: nn.Module, target: nn.Module, sharded: Mapping[int, nn.Parameter]) -> None:
    """Give ``target`` the tree of ``source`` with sharded parameters (by id of the hollow one); buffers are shared."""
    mirrors: dict[nn.Module, nn.Module] = {source: target}
    for module in source.modules():
        image = mirrors[module]
        image.training = module.training
        for name, parameter in module._parameters.items():
            image.register_parameter(name, None if parameter is None else sharded[id(parameter)])
        for name, buffer in module._buffers.items():
            image.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            if child is not None and child not in mirrors:
                indexed = isinstance(child, (nn.ModuleList, nn.Sequential))
                mirrors[child] = (_MirrorList if indexed else Mirror)(child)
            image._modules[name] = mirrors[child] if child is not None else None


def refresh_buffers(source: nn.Module, target: nn.Module) -> None:
    """A forward may assign a new tensor to a buffer; the mirror follows."""
    for image in target.modules():
        original = source if image is target else getattr(image, "_original", None)
        if original is not None:
            image._buffers.update(original._buffers)
