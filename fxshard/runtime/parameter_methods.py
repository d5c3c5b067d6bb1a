"""What sharded parameters have methods of their own for: hooks, and ``full_tensor()``.

Hooks that run after a gradient is there run on the sharded one, as with FSDP2: autograd never sees it. torch's own
``full_tensor()`` assumes rows cut as ``torch.chunk`` does, and ours may be cut otherwise.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.runtime.uneven_rows import gather_rows

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


def whole_parameters(bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """The parameters of a bucket, whole, in the dtype that is kept. Collective among the ranks that share them."""
    flat, layout, group = bucket.master, bucket.plan.layout, bucket.channels.gather
    if layout.ranks > 1:
        assert group is not None
        flat = torch.empty(layout.numel, dtype=bucket.master.dtype, device=bucket.device)
        private.all_gather(flat, bucket.master.contiguous(), group, async_op=False)
    views = [view.detach() for view in bucket.views(flat)]
    if bucket.tensor is None:
        return tuple(views)
    return tuple(bucket.tensor.whole(name, view) for name, view in zip(bucket.plan.params, views, strict=True))


class _Whole(torch.autograd.Function):
    """A parameter that was gathered. All ranks compute the same from it, so of its gradient each takes its own rows."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, whole: torch.Tensor, bucket: Bucket, name: str) -> torch.Tensor:
        ctx.bucket, ctx.name = bucket, name
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        bucket, name = ctx.bucket, ctx.name
        rows = bucket.rows(name, bucket.part(name, gradient))
        return bucket.wrap(rows.reshape(-1).clone(), name), None, None, None


class FullTensor:
    """What a sharded parameter has as ``full_tensor``. Collective among the ranks that share the parameter."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket, self._name = weakref.ref(bucket), name

    def __call__(self) -> torch.Tensor:
        """The whole parameter, in the dtype that is kept, as a tensor of its own. Autograd knows where it is from."""
        bucket = self._bucket()
        if bucket is None:
            _model_is_gone()
        parameter = bucket.params[bucket.plan.layout.index[self._name]]
        return _Whole.apply(parameter, self._gathered(bucket), bucket, self._name)  # type: ignore[no-any-return, no-untyped-call]

    def _gathered(self, bucket: Bucket) -> torch.Tensor:
        layout, group = bucket.plan.layout, bucket.channels.gather
        if layout.ranks == 1:
            return self._of_all_parts(bucket, bucket.local(self._name).detach())
        assert group is not None
        counts = [layout.fragment(rank, self._name).numel for rank in range(layout.ranks)]
        whole = gather_rows(bucket.local(self._name).detach().view(-1), counts, group)
        return self._of_all_parts(bucket, whole.view(layout.spec(self._name).shape))

    def _of_all_parts(self, bucket: Bucket, part: torch.Tensor) -> torch.Tensor:
        return part if bucket.tensor is None else bucket.tensor.whole(self._name, part)

    def __reduce__(self) -> Any:
        return _stand_in, ()

    def __deepcopy__(self, memo: Any) -> Any:
        return _stand_in()


def _stand_in() -> Callable[[], NoReturn]:
    """A copy of a parameter is not that parameter."""
    return _model_is_gone


def _model_is_gone() -> NoReturn:
    raise StateError(
        "full_tensor() of a parameter whose model does not exist any more, or of a copy of one: take "
        "model.full_state_dict() while there is a model"
    )
