"""Hooks on sharded parameters: those that run after a gradient is there run on the sharded one, as with FSDP2.

Autograd never sees the gradients of sharded parameters, so a parameter brings its own methods to register hooks.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from fxshard._torch.errors import StateError

if TYPE_CHECKING:
    from fxshard.runtime.bucket import Bucket

Hook = Callable[[torch.Tensor], None]


class RegisterAfterAccumulation:
    """What a sharded parameter has as ``register_post_accumulate_grad_hook``.

    The hook is called with the parameter once in every backward that reduces a gradient for it, when that backward is
    over: ``parameter.grad`` is the sharded gradient.
    """

    def __init__(self, bucket: Bucket, position: int) -> None:
        self._bucket, self._position = weakref.ref(bucket), position

    def __call__(self, hook: Hook) -> RemovableHandle:
        bucket = self._bucket()
        if bucket is None or not bucket.plan.trainable:
            raise StateError("a hook on a parameter that gets no gradient: it is frozen, or its model is gone")
        hooks = bucket.hooks.setdefault(self._position, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def __reduce__(self) -> Any:
        return _of_a_copy, ()


class RefusedHook:
    """What a sharded parameter has as ``register_hook``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, hook: Any) -> NoReturn:
        raise StateError(
            f"{self._name!r} is sharded: hooks of register_hook would get a gradient of this rank's that never exists "
            "by itself. Use register_post_accumulate_grad_hook, which gets the parameter with its reduced, sharded "
            "gradient"
        )

    def __reduce__(self) -> Any:
        return _of_a_copy, ()


def _of_a_copy() -> Callable[..., NoReturn]:
    return _refuse_copy


def _refuse_copy(hook: Any) -> NoReturn:
    raise StateError(
        "this is a copy of a parameter of a sharded model: make an nn.Parameter of its values to register a hook"
    )
