"""``state_dict`` and ``load_state_dict`` of a sharded model: the hooks of its modules run as in any ``nn.Module``.

Loading has three parts: what belongs where is found, with the hooks that run before; then everything is copied, or
nothing if it does not fit; then the hooks run that come after.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.frontend.state import is_extra, place_of, without_extra
from fxshard.planner.stored_names import in_our_layout, wrapping
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.loaded_rows import with_rows

Give = Callable[[torch.Tensor], torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
IncompatibleKeys = nn.modules.module._IncompatibleKeys
EXTRA = "_extra_state"


# -- saving ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def giving(model: nn.Module, give: Give) -> Iterator[None]:
    """Inside, state dicts of ``model`` have what ``give`` makes of its parameters and buffers, and hooks see that."""
    model.__dict__["_giving"] = give
    try:
        yield
    finally:
        del model.__dict__["_giving"]


def save_own(
    module: nn.Module, root: nn.Module | None, destination: dict[str, Any], prefix: str, keep_vars: bool
) -> None:
    """What a module of the model ``root`` puts into a state dict."""
    nn.Module._save_to_state_dict(module, destination, prefix, True)
    give: Give = root.__dict__.get("_giving", torch.Tensor.detach) if root is not None else torch.Tensor.detach
    for name, own in () if keep_vars else _own(module).items():
        if destination.get(prefix + name) is own:
            destination[prefix + name] = give(own)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by the plain model's keys, tied ones by each: no hook runs."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, value in _own(module).items()
    }


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """Of one module, without those inside it."""
    kept = {n: value for n, value in module._buffers.items() if n not in module._non_persistent_buffers_set}
    return {name: value for name, value in (*module._parameters.items(), *kept.items()) if value is not None}


# -- loading -----------------------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """What a state dict has for a model."""

    plain: nn.Module
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    """What is to be copied, and where to."""
    extra: list[tuple[nn.Module, Any]] = field(default_factory=list)
    after: list[tuple[nn.Module, int, int]] = field(default_factory=list)
    """Modules with hooks that come after, and how many keys were missing and unexpected when it is their turn."""


def load(
    model: nn.Module, plain: nn.Module, given: Mapping[str, Any], buckets: Sequence[Bucket], *, strict: bool
) -> Any:
    """Load whole or sharded tensors into a model, all of them or none; returns missing and unexpected keys.

    Experts may be in another layout, and ``module.`` may stand in front of all names. Extra state goes to the modules
    of the ``plain`` model.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"load_state_dict: expected a dictionary of tensors by name, got {type(given).__name__}")
    metadata = getattr(given, "_metadata", None) or {}
    given = _in_our_layout(model, given)
    given._metadata = metadata  # type: ignore[attr-defined]
    found = model.__dict__["_finding"] = _Found(plain)
    try:
        _find(model, given, metadata, "", found)
    finally:
        del model.__dict__["_finding"]
    # Hooks that come after may say that keys need not be there.
    _check(found, found.missing, found.unexpected, strict=strict and not found.after, nothing=True)
    _copy(found, buckets)
    missing, unexpected = _run_after(found)
    _check(found, missing, unexpected, strict=strict, nothing=False)
    return IncompatibleKeys(missing, unexpected)


def _in_our_layout(model: nn.Module, given: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state dict under the model's own names and in its layout, as far as these are found before hooks run."""
    own = tensors(model)
    here, there = wrapping(own), wrapping(given)
    given = {key if key in own else here + key.removeprefix(there): value for key, value in given.items()}
    taken = in_our_layout(own, without_extra(given))
    return OrderedDict({**taken, **{key: value for key, value in given.items() if is_extra(key)}})


def _find(module: nn.Module, given: dict[str, Any], metadata: Mapping[str, Any], prefix: str, found: _Found) -> None:
    """As ``nn.Module`` goes through a model. ``given``: what begins with ``prefix``, which hooks may change."""
    lists = (found.missing, found.unexpected, found.errors)
    module._load_from_state_dict(given, prefix, metadata.get(prefix[:-1], {}), True, *lists)
    for name, child in module._modules.items():
        if child is not None:
            inside = f"{prefix}{name}."
            of_child = {other: value for other, value in given.items() if other.startswith(inside)}
            _find(child, of_child, metadata, inside, found)
    if private.after_loading(module):
        found.after.append((module, len(found.missing), len(found.unexpected)))


def find_own(module: nn.Module, root: nn.Module | None, given: dict[str, Any], prefix: str, *rest: Any) -> None:
    """What a state dict has for a module of the model ``root``, in place of copying it."""
    found = root.__dict__.get("_finding") if root is not None else None
    if found is None:  # a part of a model is loaded by itself
        nn.Module._load_from_state_dict(module, given, prefix, *rest)
        return
    for hook in private.before_loading(module):
        hook(given, prefix, *rest)
    _, _, missing, unexpected, errors = rest
    own = _own(module)
    for name, target in own.items():
        if prefix + name in given:
            _match(prefix + name, target, given[prefix + name], found.pairs, errors)
        else:
            missing.append(prefix + name)
    key, original = prefix + EXTRA, found.plain.get_submodule(prefix[:-1])
    takes_extra = type(original).set_extra_state is not nn.Module.set_extra_state
    if takes_extra and key in given:
        found.extra.append((original, given[key]))
    elif takes_extra or key in given:
        (missing if takes_extra else unexpected).append(key)
    for other in given:
        if other.startswith(prefix) and other != key:
            first, *further = other[len(prefix) :].split(".", 1)
            if first not in (module._modules if further else own):
                unexpected.append(other)


def _match(key: str, target: torch.Tensor, value: Any, pairs: list[Pair], errors: list[str]) -> None:
    if not isinstance(value, torch.Tensor):
        errors.append(f"{key} is a {type(value).__name__}, the model has a tensor")
        return
    if not target.ndim and value.shape == torch.Size([1]):  # as torch once wrote tensors without dimensions
        value = value[0]
    if value.shape != target.shape:
        errors.append(f"{key} has shape {tuple(value.shape)}, the model has {tuple(target.shape)}")
    else:
        pairs.append((target, value))


def _check(found: _Found, missing: Sequence[str], unexpected: Sequence[str], *, strict: bool, nothing: bool) -> None:
    problems = [f"missing keys: {list(missing)}"] if missing and strict else []
    problems += [f"unexpected keys: {list(unexpected)}"] if unexpected and strict else []
    problems += found.errors
    if problems:
        what = (
            "the state dict does not fit the model, nothing was loaded"
            if nothing
            else "the state dict does not fit the model, what fits was loaded"
        )
        raise ConfigError(f"{what}:\n  " + "\n  ".join(problems))


@torch.no_grad()
def _copy(found: _Found, buckets: Sequence[Bucket]) -> None:
    place = place_of(buckets)
    for target, given in found.pairs:
        value = with_rows(target, given)
        at = place.get(id(target))
        if at is None:
            private.local_part(target).copy_(private.local_part(value))
        elif isinstance(value, DTensor):
            target.copy_(value)
        else:
            at[0].load({at[1]: at[0].part(at[1], value)})
    for bucket in buckets:
        bucket.loaded()
    for module, extra in found.extra:
        module.set_extra_state(extra)


def _run_after(found: _Found) -> tuple[list[str], list[str]]:
    """Missing and unexpected keys, as hooks left them: each has seen those of what came before it."""
    missing: list[str] = []
    unexpected: list[str] = []
    done = (0, 0)
    for module, *upto in [*found.after, (None, len(found.missing), len(found.unexpected))]:
        missing += found.missing[done[0] : upto[0]]
        unexpected += found.unexpected[done[1] : upto[1]]
        done = (upto[0], upto[1])
        for hook in private.after_loading(module) if module is not None else ():
            hook(module, IncompatibleKeys(missing, unexpected))
    return missing, unexpected
