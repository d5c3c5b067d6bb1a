"""Models on the meta device: made real module by module, each sharded before the next one is made.

A module's parameters and buffers get memory, are initialised (``reset_parameters``, or the function that was given),
and leave for their buckets. At any time one module is alive, besides the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from fxshard._torch.errors import ConfigError

Init = Callable[[nn.Module], object]
Take = Callable[[str, nn.Parameter], None]
"""Called with each initialised parameter; afterwards its memory is gone."""


def is_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def check_initialisable(model: nn.Module, init: Init | None) -> None:
    """Refuse modules that have no way to be initialised, all of them by name, before anything is allocated."""
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"{lazy[0]!r} has no shape yet (a lazy module): call the plain model once, below torch.no_grad(), before "
            "fxshard.compile"
        )
    if init is not None:
        return
    helpless = [
        f"{name or 'the model itself'} ({type(module).__name__}: {', '.join(_meta_tensors(module))})"
        for name, module in model.named_modules()
        if _meta_tensors(module) and not callable(getattr(module, "reset_parameters", None))
    ]
    if helpless:
        raise ConfigError(
            "the model is on the meta device, and these modules have no reset_parameters to initialise what they own: "
            + "; ".join(helpless)
            + ". Give fxshard.compile(..., init=function), which is called with every module that owns parameters or "
            "buffers, or build the model on a real device"
        )


def materialise(model: nn.Module, device: torch.device, init: Init | None, take: Take) -> dict[str, nn.Parameter]:
    """Give ``model`` real parameters on ``device``, handing each to ``take``; returns them by name.

    Tied parameters stay tied: the first module that owns one initialises it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        if not _meta_tensors(module):
            continue
        own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
        new = {key: parameter for key, parameter in own.items() if id(parameter) not in made}
        for key, parameter in own.items():
            # One that was initialised with another module has left already: a stand-in is initialised in its place.
            module._parameters[key] = _empty(parameter, device)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = _unset(buffer, device) if buffer.is_meta else buffer.to(device)
        if new or module._buffers:
            (init or _reset)(module)
            _check_initialised(path, module)
        for key, parameter in own.items():
            if key in new:
                real = module._parameters[key]
                assert real is not None
                made[id(parameter)] = real
                take(names[id(parameter)], real)
            module._parameters[key] = made[id(parameter)]
    return {names[old]: parameter for old, parameter in made.items()}


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def _empty(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    real = nn.Parameter(_unset(parameter, device), parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    return real


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory that is recognisably not initialised: NaN, or the least integer."""
    value = torch.empty_like(like, device=device, requires_grad=False)
    if value.is_floating_point():
        return value.fill_(float("nan"))
    return value.zero_() if value.dtype is torch.bool or value.is_complex() else value.fill_(_least(value))


def _least(value: torch.Tensor) -> int:
    return torch.iinfo(value.dtype).min


def _check_initialised(path: str, module: nn.Module) -> None:
    for key, value in _tensors(module):
        if value.numel() == 0 or value.dtype is torch.bool or value.is_complex():
            continue
        unset = value.isnan() if value.is_floating_point() else (value == _least(value)) & (value.dtype != torch.uint8)
        if bool(unset.any()):
            raise ConfigError(
                f"{path + '.' if path else ''}{key} was not initialised: init (or reset_parameters) of "
                f"{type(module).__name__} left it as it was, or wrote NaN"
            )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None:
            yield key, value


def _meta_tensors(module: nn.Module) -> list[str]:
    return [key for key, value in _tensors(module) if value.is_meta]
