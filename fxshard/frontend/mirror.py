"""The tree of a plain model, mirrored: modules of the same classes in which sharded parameters stand for hollow ones.

What is written to a mirror reaches the module that it stands for, where forward reads it: data, buffers and hooks are
shared. What cannot reach it, because parameters and modules were taken apart, is refused.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.nn.modules import container
from torch.utils.hooks import RemovableHandle

from fxshard._torch.errors import StateError
from fxshard._torch.private import copy_state_hooks
from fxshard.frontend.state_dicts import find_own, load, save_own

_BEFORE = "change the plain model, before fxshard.compile"
SHARED = (
    "_buffers",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""What a mirror and its original have in common, the same objects."""


class Fixed(dict[str, Any]):
    """Parameters, or modules, of a sharded model: their names and objects are what the shards were made for."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_change(repr(args[0]) if args and isinstance(args[0], str) else "a module or parameter")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    pop = popitem = clear = update = setdefault = _refuse  # type: ignore[assignment]


def _refuse_change(what: str) -> NoReturn:
    raise StateError(
        f"{what} cannot be replaced, added or removed in a sharded model: {_BEFORE}. Values of a parameter are "
        "changed by load_state_dict, or by operations on it below torch.no_grad()"
    )


class Mirror(nn.Module):
    """Stands where a submodule of the plain model stood, and holds its sharded parameters."""

    _original: nn.Module
    _root: weakref.ref[nn.Module]

    def __getattribute__(self, name: str) -> Any:
        """What the original was given itself comes before what its class has."""
        own = super().__getattribute__("__dict__")
        if name not in own and name != "forward" and name in getattr(own.get("_original"), "__dict__", ()):
            return self._as_ours(name, own["_original"].__dict__[name])
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        for own in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__.get(own, ()):
                return self.__dict__[own][name]
        if "_original" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._as_ours(name, getattr(self._original, name))

    def _as_ours(self, name: str, value: Any) -> Any:
        bound = isinstance(value, types.MethodType) and value.__self__ is self._original
        return partial(_refuse_method, self._get_name(), name) if bound else value

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_original")
        if original is None:
            super().__setattr__(name, value)
        elif name in ("forward", "__class__"):
            raise StateError(f"{name} of {self._get_name()} cannot be replaced in a sharded model: {_BEFORE}")
        elif name in self._parameters or name in self._modules or isinstance(value, nn.Parameter | nn.Module):
            _refuse_change(repr(name))
        else:
            setattr(original, name, value)
            if name in self.__dict__:  # of nn.Module's own: training
                self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        if name in self._parameters or name in self._modules:
            _refuse_change(repr(name))
        delattr(self._original, name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        _refuse_change(repr(name))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        _refuse_change(repr(name))

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        self._original.register_buffer(name, tensor, persistent)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        root = self._root()
        unsharded = root.__dict__.get("_unsharded") if root is not None else None
        if unsharded is not None:
            return unsharded.run(self._original, args, kwargs)
        raise StateError(
            f"a part of a sharded model ({self._get_name()}) does not run on its own, its parameters are not in "
            "memory: call the whole model, let its forward return what is needed, or call it inside model.unshard()"
        )

    def train(self, mode: bool = True) -> Self:
        self._original.train(mode)
        follow_training(self)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        refuse_moves(self, fn)
        return self

    # -- hooks: Dynamo does not look whether they are those that it traced -------------------------------------------

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:  # type: ignore[override]
        return self._traced_again(super().register_forward_hook, *args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:  # type: ignore[override]
        return self._traced_again(super().register_forward_pre_hook, *args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        raise StateError(
            f"backward hooks of a part of a sharded model ({self._get_name()}) do not run, torch.compile does not "
            "trace them: register one on the output, in a forward hook (output.register_hook), or on a parameter "
            "(register_post_accumulate_grad_hook)"
        )

    register_backward_hook = register_full_backward_pre_hook = register_full_backward_hook  # type: ignore[assignment]

    def _traced_again(self, register: Callable[..., RemovableHandle], *args: Any, **kwargs: Any) -> RemovableHandle:
        root = self._root()
        assert root is not None
        root.capture_again()  # type: ignore[operator]
        return _Handle(register(*args, **kwargs), self._root)

    # -- looks -------------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"a part of a sharded model ({self._get_name()}) cannot be copied or pickled, its parameters are spread "
            "over ranks: take full_state_dict() of the whole model"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(4)

    def _get_name(self) -> str:
        return self._original._get_name()

    def extra_repr(self) -> str:
        return self._original.extra_repr()


class OwnState(nn.Module):
    """What a part puts into state dicts and takes from them. Classes that add to that call it in place of
    ``nn.Module``, before which it stands among their bases."""

    _root: weakref.ref[nn.Module]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        save_own(self, self._root(), destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:  # type: ignore[override]
        find_own(self, self._root(), state_dict, prefix, *rest)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        root: Any = self._root()
        if assign or root is None or self._modules is not root._modules:  # a part of a model is loaded by itself
            return super().load_state_dict(state_dict, strict, assign)
        return load(root, root._inner, state_dict, root._sharding.buckets, strict=strict)


class _Handle(RemovableHandle):
    """The handle of a hook that was traced: without it, the model is captured again."""

    def __init__(self, handle: RemovableHandle, root: weakref.ref[nn.Module]) -> None:
        self._handle, self._model, self.id = handle, root, handle.id

    def remove(self) -> None:
        self._handle.remove()
        root = self._model()
        if root is not None:
            root.capture_again()  # type: ignore[operator]


def _refuse_method(module: str, method: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise StateError(
        f"{method}() of {module}: parts of a sharded model have data and parameters, but their methods do not run on "
        "their own; call a method of the whole model, or this one on the plain model, before fxshard.compile"
    )


# -- classes -----------------------------------------------------------------------------------------------------------

_CHANGES = frozenset(
    {"append", "extend", "insert", "pop", "popitem", "clear", "update", "setdefault"}
    | {"__setitem__", "__delitem__", "__iadd__", "__imul__", "__ior__"}
)
"""Methods of containers that change what is in them."""
_CLASSES: weakref.WeakValueDictionary[type[nn.Module], type[Mirror]] = weakref.WeakValueDictionary()


def _class_for(plain: type[nn.Module]) -> type[Mirror]:
    """A mirror that ``isinstance`` takes for what it stands for. Reading a container works, other methods do not."""
    found = _CLASSES.get(plain)
    if found is None:
        members = {}
        for base in reversed([base for base in plain.__mro__ if base not in (nn.Module, object)]):
            members.update({name: ours for name, value in vars(base).items() if (ours := _member(base, name, value))})
        if hasattr(plain, "__getitem__") and issubclass(plain, nn.ModuleList | nn.Sequential):
            members["__getitem__"] = item
        bases = (Mirror, OwnState) if plain is nn.Module else (Mirror, plain, OwnState)
        found = _CLASSES[plain] = types.new_class(plain.__name__, bases, exec_body=lambda ns: ns.update(members))
        found.__module__, found.__qualname__ = plain.__module__, plain.__qualname__
    return found


def _member(base: type, name: str, value: Any) -> Any:
    """What takes the place of a function of a class in its mirror; None: it stays."""
    if not isinstance(value, types.FunctionType) or name in vars(Mirror) or name == "__init__":
        return None
    if name in _CHANGES:
        return lambda self, *args, **kwargs: _refuse_change(f"what a {self._get_name()} holds")
    if base.__module__ == container.__name__:
        return None
    if name in ("get_extra_state", "set_extra_state"):
        return lambda self, *args: getattr(self._original, name)(*args)
    if name in vars(OwnState) or name == "state_dict":
        return None
    if name in vars(nn.Module):
        return vars(nn.Module)[name]  # what a class does of its own there, it does with weights that are gone
    if not name.startswith("__"):
        return lambda self, *args, **kwargs: _refuse_method(self._get_name(), name)
    return None


def item(self: nn.Module, index: int | slice) -> nn.Module:
    """What a container of modules has at a place; for a slice, a list of its own."""
    children = list(self._modules.values())
    return nn.ModuleList(children[index]) if isinstance(index, slice) else children[index]  # type: ignore[arg-type,return-value]


# -- trees -------------------------------------------------------------------------------------------------------------


def mirror(source: nn.Module, target: nn.Module, sharded: Mapping[int, nn.Parameter]) -> None:
    """Give ``target`` the tree of ``source`` with sharded parameters, by id of the hollow one."""
    root = weakref.ref(target)
    mirrors: dict[nn.Module, nn.Module] = {source: target}
    for module in source.modules():
        image = mirrors[module]
        for child in module._modules.values():
            if child is not None and child not in mirrors:
                mirrors[child] = _image(child, root)
        own = image.__dict__
        own["training"] = module.training
        own["_parameters"] = Fixed({n: None if p is None else sharded[id(p)] for n, p in module._parameters.items()})
        own["_modules"] = Fixed({n: None if m is None else mirrors[m] for n, m in module._modules.items()})
        shared = SHARED if module is not source else SHARED[:2]  # hooks of the whole model run around its graph
        own.update({name: module.__dict__[name] for name in shared})
        copy_state_hooks(module, image)


def _image(original: nn.Module, root: weakref.ref[nn.Module]) -> Mirror:
    kind = _class_for(type(original))
    image = kind.__new__(kind)
    nn.Module.__init__(image)
    image.__dict__["_root"] = root
    image.__dict__["_original"] = original  # no submodule: its parameters are hollow
    return image


def stand_in(model: nn.Module, plain: nn.Module) -> Any:
    """The whole model, as code of its class finds it: what the class does of its own with state dicts runs on it."""
    image = _image(plain, weakref.ref(model))
    image.__dict__.update({name: value for name, value in model.__dict__.items() if name in image.__dict__})
    return image


def follow_training(module: nn.Module) -> None:
    """Whether originals train or not is for them to say: ``train`` of some classes leaves out a part."""
    for image in module.modules():
        if isinstance(image, Mirror):
            image.__dict__["training"] = image._original.training


def refuse_moves(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """``to()``, ``cuda()``, ``float()`` and the like: accepted where they change nothing."""
    kinds = {(value.device, value.dtype) for value in (*module.parameters(), *module.buffers())}
    empty = [torch.empty(0, device=device, dtype=dtype) for device, dtype in kinds]
    if not all(_stays(tensor, fn(tensor)) for tensor in empty):
        raise StateError(
            "a sharded model cannot be moved or cast: move or cast the plain model before fxshard.compile, "
            "or choose the compute dtype with precision=fxshard.Precision(...)"
        )


def _stays(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether nothing changed. There is one CPU, however it is numbered: a Trainer calls it ``cpu:1`` on rank 1, and
    torch makes a copy for that."""
    return after is before or (before.is_cpu and after.is_cpu and after.dtype == before.dtype)
