"""The tree of a plain model, mirrored: modules of the same names in which sharded parameters stand for hollow ones."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, Self

from torch import nn

from fxshard._torch.errors import StateError


class Mirror(nn.Module):
    """Stands where a submodule of the plain model stood, and holds its sharded parameters."""

    _original: nn.Module

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_original", original)  # no submodule: its parameters are hollow

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError(
            f"a part of a sharded model ({self._get_name()}) does not run on its own, its parameters are not in "
            "memory: call the whole model, or let its forward return what is needed"
        )

    def __getattr__(self, name: str) -> Any:
        for own in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__.get(own, ()):
                return self.__dict__[own][name]
        if "_original" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._original, name)
        if isinstance(value, types.MethodType) and value.__self__ is self._original:
            return partial(_refuse, self._get_name(), name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Data of the original is set there, where forward reads it."""
        if name not in self.__dict__ and name in getattr(self.__dict__.get("_original"), "__dict__", ()):
            setattr(self._original, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Self:
        self._original.train(mode)
        return super().train(mode)

    def _get_name(self) -> str:
        return self._original._get_name()

    def extra_repr(self) -> str:
        return self._original.extra_repr()


class _MirrorList(Mirror):
    """A mirror of something that is indexed by number."""

    def __getitem__(self, index: int) -> nn.Module:
        return list(self._modules.values())[index]  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]


def _refuse(module: str, method: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise StateError(
        f"{method}() of {module}: parts of a sharded model have data and parameters, but their methods do not run on "
        "their own; call a method of the whole model, or this one on the plain model, before fxshard.compile"
    )


def mirror(source: nn.Module, target: nn.Module, sharded: Mapping[int, nn.Parameter]) -> None:
    """Give ``target`` the tree of ``source`` with sharded parameters (by id of the hollow one); buffers are shared."""
    mirrors: dict[nn.Module, nn.Module] = {source: target}
    for module in source.modules():
        image = mirrors[module]
        image.training = module.training
        for name, parameter in module._parameters.items():
            image._parameters[name] = None if parameter is None else sharded[id(parameter)]
        image._buffers.update(module._buffers)
        image._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
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
