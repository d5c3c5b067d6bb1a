"""A sharded model looks like the one it was made from: its data attributes, its methods, the signature of its forward.

Data comes from the plain model, and assigning it reaches the plain model. Methods run on the plain model, which gets
weights where they compute with them. What cannot work any more says what to do instead.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from fxshard._torch.errors import StateError
from fxshard.frontend.capture import drop_input_gradient_hooks
from fxshard.frontend.mirror import Mirror, item, stand_in
from fxshard.frontend.pretrained import save_pretrained
from fxshard.runtime.borrowed import borrowed

if TYPE_CHECKING:
    from fxshard.frontend.module import ShardedModule

T = TypeVar("T", bound=nn.Module)

WITH_ALL_WEIGHTS = frozenset({"generate"})
"""Methods that are known to use every parameter: gathered once, so that ranks then go on independently."""

_BEFORE = "call it on the plain model, before fxshard.compile"
_MERGE = "save the model and call it on a plain one that loads the files"
REFUSED = {
    "resize_token_embeddings": _BEFORE,
    "set_input_embeddings": _BEFORE,
    "set_output_embeddings": _BEFORE,
    "tie_weights": _BEFORE,
    "init_weights": _BEFORE,
    "add_adapter": _BEFORE,
    "load_adapter": _BEFORE,
    "delete_adapter": _BEFORE,
    "add_weighted_adapter": _BEFORE,
    "unload": _BEFORE,
    "merge_and_unload": _MERGE,
    "merge_adapter": _MERGE,
    "unmerge_adapter": _MERGE,
    "push_to_hub": "call save_pretrained(folder) on every rank, then upload the folder from one",
}
"""Methods that would change parameters which are spread over ranks, and what to do."""


def attribute(image: nn.Module, original: nn.Module, name: str) -> Any:
    """What ``original`` has under a name that the module which stands for it does not have itself."""
    declared = inspect.getattr_static(type(original), name, None)
    if isinstance(declared, property) and declared.fget is not None:
        return declared.fget(image)  # dtype, device and the like look at parameters: at those that are there
    return getattr(original, name)


def is_method(value: object, original: nn.Module) -> TypeGuard[types.MethodType]:
    """Whether it computes with the plain model: a method of it, or of a module inside that it hands out as its own.

    peft's models have the methods of the models that they adapt.
    """
    return isinstance(value, types.MethodType) and any(value.__self__ is module for module in original.modules())


OWN = {"save_pretrained": save_pretrained}
"""Methods of ``transformers`` that are written anew, for models that are spread over ranks."""


def method(model: ShardedModule, original: types.MethodType) -> Callable[..., Any]:
    """A method of the plain model, for callers of the sharded one."""
    sharding, plain, name = model._sharding, model._inner, original.__name__
    if name in OWN and original.__self__ is plain:
        return functools.partial(OWN[name], model)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name in REFUSED:
            raise StateError(f"{name}() would change parameters that are spread over ranks: {REFUSED[name]}")
        if model._unsharded is not None:
            model._unsharded.refuse(f"{name}() was called")
        before = _structure(plain)
        with borrowed(sharding.engine, sharding.hollow_places(), name, all_at_once=name in WITH_ALL_WEIGHTS):
            result = original(*args, **kwargs)
        drop_input_gradient_hooks(plain)
        if _structure(plain) != before:
            raise StateError(
                f"{name}() changed modules or parameters of the plain model, and the sharded one cannot follow: "
                f"{_BEFORE}. This model cannot be used any more"
            )
        return _of_sharded(result, model, plain)

    return call


def _of_sharded(result: Any, model: nn.Module, plain: nn.Module) -> Any:
    """What a method returned, with modules and parameters of the sharded model in place of those of the plain one."""
    mirrors: dict[nn.Module, nn.Module] = {plain: model}
    mirrors.update({image._original: image for image in model.modules() if isinstance(image, Mirror)})
    if isinstance(result, nn.Module):
        return mirrors.get(result, result)
    if isinstance(result, nn.Parameter):
        parameters = {id(parameter): image for parameter, image in _parameters(mirrors)}
        return parameters.get(id(result), result)
    return result


def _parameters(mirrors: dict[nn.Module, nn.Module]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return [
        (parameter, image)
        for module, mirrored in mirrors.items()
        for name, parameter in module._parameters.items()
        if parameter is not None and (image := mirrored._parameters[name]) is not None
    ]


def _structure(plain: nn.Module) -> list[tuple[str, int]]:
    modules = [(name, id(module)) for name, module in plain.named_modules()]
    return modules + [(name, id(parameter)) for name, parameter in plain.named_parameters(remove_duplicate=False)]


def class_for(base: type[T], plain: type[nn.Module]) -> type[T]:
    """``base`` with the signature of a plain model's forward, which trainers look at to know what a model takes."""
    if plain not in _CLASSES:
        forward: Any = base.forward
        own: Any = types.FunctionType(
            forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
        )
        own.__doc__, own.__signature__ = plain.forward.__doc__, inspect.signature(plain.forward)
        members: dict[str, Any] = {"forward": own, "__module__": base.__module__, **_container_methods(plain)}
        members["_version"] = plain._version  # state dicts say it, and hooks are told
        if any(each.__module__.startswith("peft.") for each in plain.__mro__):
            members["__class__"] = property(lambda _: plain)  # isinstance(model, PeftModel) is how trainers ask
        if plain.get_extra_state is not nn.Module.get_extra_state:
            members["get_extra_state"] = lambda self: self._inner.get_extra_state()
            members["set_extra_state"] = lambda self, state: self._inner.set_extra_state(state)
        for name, ours in _STATE.items():
            if getattr(plain, name) is not getattr(nn.Module, name):
                members[ours] = _as_class_does(name)
        _CLASSES[plain] = type(f"Sharded{plain.__name__}", (base,), members)
    return _CLASSES[plain]  # type: ignore[no-any-return]


_STATE = {
    "_save_to_state_dict": "_save_to_state_dict",
    "_load_from_state_dict": "_load_from_state_dict",
    "state_dict": "_give_state_dict",
    "load_state_dict": "_take_state_dict",
}
"""What classes do of their own with state dicts, and which method of a sharded model does it then."""


def _as_class_does(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(stand_in(self, self._inner), name)(*args, **kwargs)


def _container_methods(plain: type[nn.Module]) -> dict[str, Any]:
    """``model[0]``, ``len(model)`` and loops over a model that is an ``nn.Sequential``."""
    if not issubclass(plain, nn.Sequential):
        return {}
    return {
        "__getitem__": item,
        "__len__": lambda self: len(self._modules),
        "__iter__": lambda self: iter(self._modules.values()),
    }


_CLASSES: WeakKeyDictionary[type[nn.Module], Any] = WeakKeyDictionary()
