"""Whole weights in place of the sharded ones, for code that needs them: ``model.unshard()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from fxshard._torch.errors import ConfigError, StateError
from fxshard.frontend.mirror import Fixed, Mirror
from fxshard.frontend.state import places
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.parameter_methods import FullTensor, whole_parameters

if TYPE_CHECKING:
    from fxshard.frontend.module import ShardedModule


class Unsharded:
    """Parameters of a model, or of parts of it, whole on every rank; a context that ends with ``model.reshard()``.

    They stand where the sharded ones did, in the dtype that is kept, in memory of their own.
    """

    def __init__(self, model: ShardedModule, parts: Sequence[nn.Module | str], *, writeback: bool) -> None:
        self._model, self._writeback = model, writeback
        chosen = {id(parameter) for part in parts or [model] for parameter in _part(model, part).parameters()}
        self._places = [place for place in places(model._sharding.buckets) if id(place[2]) in chosen]
        self._buckets = list({id(bucket): bucket for bucket, _, _ in self._places}.values())
        self._versions = [bucket.version for bucket in self._buckets]
        self.whole = {name: value for bucket in self._buckets for name, value in self._gathered(bucket).items()}
        self._written_at = {name: (value._version, value.data_ptr()) for name, value in self.whole.items()}
        in_place_of = {id(parameter): self.whole[name] for _, name, parameter in self._places}
        self._before = {module: module.__dict__["_parameters"] for module in model.modules()}
        for module, own in self._before.items():
            module.__dict__["_parameters"] = Fixed({n: in_place_of.get(id(p), p) for n, p in own.items()})
        self._hook = None
        if model._optimizer is not None:
            self._hook = model._optimizer.register_step_pre_hook(lambda *_: self.refuse("optimizer.step() was called"))

    def _gathered(self, bucket: Bucket) -> dict[str, nn.Parameter]:
        """The chosen parameters of a bucket: all with one collective, or one by one where others would be left over."""
        wanted = {name: p for of, name, p in self._places if of is bucket}
        if len(wanted) == len(bucket.params):
            found = dict(zip(bucket.plan.params, whole_parameters(bucket), strict=True))
        else:
            found = {name: FullTensor(bucket, name)() for name in wanted}
        # Of one rank's own memory, and of a tensor that all are views of, each gets a copy.
        return {name: nn.Parameter(found[name].detach().clone(), p.requires_grad) for name, p in wanted.items()}

    def __enter__(self) -> dict[str, nn.Parameter]:
        return self.whole

    def __exit__(self, kind: object, *error: object) -> None:
        self.close(discard=kind is not None)

    def run(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward of a part of the plain model on whole weights; its own hooks have run."""
        hollow = {id(parameter): name for name, parameter in self._model._sharding.hollow.items()}
        names = {name: hollow[id(p)] for name, p in part.named_parameters(remove_duplicate=False)}
        lacking = [name for name in names.values() if name not in self.whole]
        if lacking:
            raise StateError(f"this part of the model also uses {lacking[0]}, which is not unsharded: unshard it too")
        values: dict[str, torch.Tensor] = {f"part.{name}": self.whole[own] for name, own in names.items()}
        return torch.func.functional_call(_Forward(part), values, args, kwargs, tie_weights=False)

    def refuse(self, what: str) -> NoReturn:
        raise StateError(
            f"{what} inside model.unshard(): it would use the shards, which do not have what was written to whole "
            "weights; call it after model.reshard(), or after the block"
        )

    def close(self, *, discard: bool = False) -> None:
        """Put the sharded parameters back, and into them what was written; if ``discard``, nothing is looked at."""
        self._model.__dict__["_unsharded"] = None
        if self._hook is not None:
            self._hook.remove()
        for module, own in self._before.items():
            module.__dict__["_parameters"] = own
        if discard:
            return
        self._check()
        if self._writeback:
            for bucket in self._buckets:
                own = [name for of, name, _ in self._places if of is bucket]
                bucket.load({name: bucket.part(name, self.whole[name].detach()) for name in own})

    def _check(self) -> None:
        changed = [b for b, version in zip(self._buckets, self._versions, strict=True) if b.version != version]
        if changed:
            raise StateError(
                f"the shards of {changed[0].plan.params[0]} changed inside model.unshard(), by an optimizer or by "
                "loading: they stay as they are now, and nothing of what was written to whole weights was kept"
            )
        with_grad = [name for name, value in self.whole.items() if value.grad is not None]
        if with_grad:
            raise StateError(
                f"a gradient of the whole {with_grad[0]} was computed inside model.unshard(), and sharded parameters "
                "do not get it: train through model(...), compute below torch.no_grad() inside"
            )
        shapes = {name: tuple(bucket.shape(name)) for bucket, name, _ in self._places}
        reshaped = [name for name, value in self.whole.items() if tuple(value.shape) != shapes[name]]
        if reshaped:
            raise StateError(f"{reshaped[0]} was given another shape inside model.unshard(): nothing was kept")
        now = {name: (value._version, value.data_ptr()) for name, value in self.whole.items()}
        written = [name for name, at in now.items() if at != self._written_at[name]]
        if written and not self._writeback:
            raise StateError(
                f"{', '.join(written[:3])} {'were' if written[1:] else 'was'} written inside "
                "model.unshard(writeback=False), and shards do not follow: pass writeback=True to keep what is written"
            )


class _Forward(nn.Module):
    """Only the forward of a module: hooks of its own are not called."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part.forward(*args, **kwargs)


def _part(model: ShardedModule, part: nn.Module | str) -> nn.Module:
    """A part of a sharded model by its name, or as ``model.layers[0]`` gives it."""
    if isinstance(part, str):
        try:
            return model.get_submodule(part)
        except AttributeError as error:
            raise ConfigError(f"unshard({part!r}): {error}") from None
    if part is model or (isinstance(part, Mirror) and any(part is own for own in model.modules())):
        return part
    raise ConfigError(
        f"unshard({type(part).__name__}): it is no part of this sharded model; give names, or parts such as "
        "model.layers[0]"
    )
