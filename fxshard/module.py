"""``ShardedModule``: what ``fxshard.compile`` returns, a module with the names of the one it was made from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fxshard import _compat
from fxshard.backend import Backend
from fxshard.capture import FAILURES, cast_floats, explained
from fxshard.errors import ConfigError, FxshardError, PeerError, RankDivergenceError, StateError
from fxshard.events import Phase
from fxshard.inspect.schedule import Schedule
from fxshard.lowering import Compilations
from fxshard.profile import Profile, structure
from fxshard.runtime.agreement import COMMUNICATION
from fxshard.runtime.eager_reads import EagerReads
from fxshard.runtime.norms import clip_gradients
from fxshard.runtime.recorder import Recorder
from fxshard.runtime.unreduced import refuse_unreduced
from fxshard.sharding import Sharding


class ShardedModule(nn.Module):
    """A module whose parameters are sharded: same names, same forward, this rank's part of the memory.

    ``parameters()`` gives sharded tensors (``DTensor`` where there is a process group) that any ``torch.optim`` class
    and ``clip_grad_norm_`` take. ``model.layers[0].weight`` works as before.
    """

    _inner: nn.Module
    _compiled: Callable[..., Any] | None
    _compile: Callable[[], Callable[..., Any]]

    def __init__(self, inner: nn.Module, sharding: Sharding, backend: Backend) -> None:
        super().__init__()
        # Not registered as a submodule: its parameters are hollow and have no place in parameters() or state_dict().
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_compiled", None)
        self._sharding = sharding
        self._backend = backend
        self._optimizer: torch.optim.Optimizer | None = None
        self._reads: EagerReads | None = None
        by_name = {
            name: p for bucket in sharding.buckets for name, p in zip(bucket.plan.params, bucket.params, strict=True)
        }
        by_identity = {id(hollow): by_name[name] for name, hollow in sharding.hollow.items()}
        _mirror(inner, self, by_identity)
        self.training = inner.training

    def bind(self, compile: Callable[[], Callable[..., Any]], *, fullgraph: bool = True) -> None:
        """Run what ``compile`` gives from now on, and ask it again to reschedule; ``fxshard.compile`` calls this."""
        self._backend.one_graph, self._backend.allows_breaks = fullgraph, not fullgraph
        if not fullgraph:
            self._reads = EagerReads(self._sharding.engine, self._sharding.hollow_places())
        object.__setattr__(self, "_compile", compile)
        object.__setattr__(self, "_compiled", compile())  # an nn.Module too, and no submodule of ours

    # -- running -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._sharding.precision
        if precision is not None and precision.param is not None and precision.cast_inputs:
            args, kwargs = cast_floats((args, kwargs), precision.param)
        if torch.compiler.is_compiling():  # torch.compile(model, backend="fxshard") traces through here
            return self._inner(*args, **kwargs)
        self._check_trainable()
        if self._compiled is None:
            raise StateError(
                "this model is sharded but not compiled, and its parameters are not in memory: "
                'call torch.compile(model, backend="fxshard") and use the result, or make it with fxshard.compile'
            )
        try:
            with self._reads or contextlib.nullcontext():
                result = self._compiled(*args, **kwargs)
        except FAILURES as error:
            raise self._failed(explained(error, self._inner)) from error
        except FxshardError as error:
            raise self._failed(error) from None
        except RuntimeError as error:
            if "storage of size 0" in str(error):
                raise StateError(_RETURNS_PARAMETER) from error
            raise
        if any(_is_hollow(leaf) for leaf in tree_leaves(result)):
            raise StateError(_RETURNS_PARAMETER)
        return result

    def _failed(self, error: FxshardError) -> FxshardError:
        """Until the ranks have agreed on a schedule, each waits for the others there: tell them not to."""
        told_already = isinstance(error, (PeerError, RankDivergenceError))
        if not told_already and not self._sharding.agreement.settled(COMMUNICATION):
            self._sharding.agreement.fail(error)
        return error

    def _check_trainable(self) -> None:
        for bucket in self._sharding.buckets:
            for name, parameter in zip(bucket.plan.params, bucket.params, strict=True):
                if parameter.requires_grad != bucket.plan.trainable:
                    raise StateError(
                        f"{name!r} was {'trained' if bucket.plan.trainable else 'frozen'} when the model was sharded; "
                        "set requires_grad on the plain model, before fxshard.compile"
                    )

    def train(self, mode: bool = True) -> ShardedModule:
        self._inner.train(mode)
        return super().train(mode)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer given to ``fxshard.compile``."""
        if self._optimizer is None:
            raise StateError(
                "no optimizer was given: pass optimizer=fxshard.AdamW(...), or use torch.optim with model.parameters()"
            )
        return self._optimizer

    @contextmanager
    def profile(self, steps: int = 3) -> Iterator[Profile]:
        """Record how long compute and collectives of the first ``steps`` steps inside the block take. Collective.

        The steps are real ones with the same results; they are slower, because nothing overlaps while it is timed. The
        profile is filled when the block ends, with the same figures on every rank.

        >>> with model.profile(steps=3) as profile:
        ...     for x, y in batches:
        ...         train(model, x, y)
        >>> model.reschedule(profile)
        """
        engine = self._sharding.engine
        if engine.recorder is not None:
            raise StateError("this model is being profiled already")
        if steps < 1:
            raise ConfigError(f"profile(steps={steps}): expected at least one step")
        profile, options = Profile(), engine.frame.options
        recorder = engine.recorder = Recorder(engine.device, steps)
        engine.frame.options = replace(options, overlap=False)
        try:
            yield profile
        finally:
            engine.recorder, engine.frame.options = None, options
        recorder.close()
        events = self.schedule.events
        phases = {
            phase: [event for event in events if event.phase is phase] for phase in (Phase.FORWARD, Phase.BACKWARD)
        }
        shared = self._sharding.agreement.share(recorder.samples)
        filled = Profile.from_samples(shared, {str(phase): structure(own) for phase, own in phases.items() if own})
        profile.seconds.update(filled.seconds)
        profile.structure.update(filled.structure)

    def reschedule(self, profile: Profile | None) -> None:
        """Order gathers by recorded durations from the next call on, or by estimates again (None).

        The next call captures the model again; what was compiled is used again. No result changes. All ranks must
        call this with the same profile.
        """
        if self._compiled is None:
            raise StateError("only a model from fxshard.compile can be rescheduled: this one is sharded, not compiled")
        if profile is not None and not profile.seconds:
            raise ConfigError("the profile is empty: run at least one training step inside model.profile()")
        self._sharding.profile = profile
        object.__setattr__(self, "_compiled", self._compile())

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """The emitted communication schedule; it exists once the model has been called."""
        schedules = self._backend.schedules
        if not schedules:
            raise StateError("there is no schedule yet: it is made when the model is called for the first time")
        return schedules.get("train") or schedules["eval"]

    @property
    def schedules(self) -> dict[str, Schedule]:
        """All emitted schedules: ``train``, ``eval``, and ``accumulate`` for micro-batches inside ``no_sync``."""
        return dict(self._backend.schedules)

    @property
    def emitted(self) -> tuple[Schedule, ...]:
        """Every schedule emitted so far, in order of capture: one per graph, input shape and mode."""
        return tuple(self._backend.emitted)

    @property
    def graph_breaks(self) -> tuple[str, ...]:
        """Where and why graphs ended before ``forward`` did; only with ``fullgraph=False``."""
        return tuple(self._backend.breaks)

    @property
    def eager_reads(self) -> dict[str, str]:
        """Parameters that code between graphs read, and the file and line that did; only with ``fullgraph=False``."""
        return dict(self._reads.places) if self._reads is not None else {}

    @property
    def unused_parameters(self) -> list[str]:
        """Parameters that no graph uses and no code between graphs read so far: they get zero or no gradients."""
        used = {self._sharding.plans[ref.bucket].params[ref.position] for ref in self._backend.used}
        return [name for _, name, _ in self._places() if name not in used and name not in self.eager_reads]

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The rewritten graphs by phase: ``print(model.graphs["forward"].graph)``, likewise backward and eval."""
        return dict(self._backend.graphs)

    @property
    def compilations(self) -> Compilations:
        """What was compiled so far; ``captures`` grows when another input shape or mode is met."""
        compiler = self._sharding.compiler
        return Compilations(compiler.segments, compiler.compilations, self._backend.captures)

    @property
    def zero(self) -> int:
        return self._sharding.zero

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        self._refresh_buffers()
        return super().named_buffers(*args, **kwargs)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> Any:
        """Sharded parameters and buffers under the plain model's keys; ``torch.save`` takes them."""
        self._refresh_buffers()
        state = super().state_dict(*args, keep_vars=True, **kwargs)
        if keep_vars:
            return state
        place = {id(parameter): (bucket, name) for bucket, name, parameter in self._places()}
        for key, value in state.items():
            bucket, name = place.get(id(value), (None, ""))
            state[key] = value.detach() if bucket is None else bucket.as_param(bucket.master, name)
        return state

    def _refresh_buffers(self) -> None:
        """A forward may assign a new tensor to a buffer; the mirror follows."""
        for mirror in self.modules():
            original = self._inner if mirror is self else getattr(mirror, "_original", None)
            if original is not None:
                mirror._buffers.update(original._buffers)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The unsharded model on every rank, on the CPU, with the plain model's keys. A collective call."""
        full: dict[int, torch.Tensor] = {}
        for bucket in self._sharding.buckets:
            flat = bucket.master
            if bucket.plan.layout.ranks > 1:
                group = bucket.channels.gather
                assert group is not None
                flat = torch.empty(bucket.plan.layout.numel, dtype=bucket.master.dtype, device=bucket.device)
                _compat.all_gather(flat, bucket.master.contiguous(), group, async_op=False)
            for parameter, view in zip(bucket.params, bucket.views(flat), strict=True):
                full[id(parameter)] = view.detach().cpu().clone()
        state = self.state_dict(keep_vars=True)
        return {
            key: full[id(value)] if id(value) in full else value.detach().cpu().clone() for key, value in state.items()
        }

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a plain (full) or a sharded state dict. Everything is checked before anything is changed."""
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True): a sharded parameter is a view of its bucket; load without assign"
            )
        own = self.state_dict(keep_vars=True)
        missing, unexpected = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
        problems = [f"missing keys: {missing}"] if missing and strict else []
        problems += [f"unexpected keys: {unexpected}"] if unexpected and strict else []
        shared = [key for key in own if key in state_dict]
        problems += [
            f"{key} has shape {tuple(state_dict[key].shape)}, the model has {tuple(own[key].shape)}"
            for key in shared
            if state_dict[key].shape != own[key].shape
        ]
        if problems:
            raise ConfigError("the state dict does not fit the model, nothing was loaded:\n  " + "\n  ".join(problems))
        place = {id(p): (bucket, name) for bucket, name, p in self._places()}
        with torch.no_grad():
            for key in shared:
                target, value = own[key], state_dict[key]
                found = place.get(id(target))
                if found is None or isinstance(value, dist.tensor.DTensor):
                    target.copy_(value)
                else:
                    found[0].load({found[1]: value})
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def bytes_at_rest(self) -> dict[str, int]:
        """Bytes this rank holds between steps, counted from the storages that exist: param, grad, state."""
        from fxshard.runtime.bucket import total_bytes

        sizes = total_bytes(self._sharding.buckets)
        if self._optimizer is not None:
            sizes["state"] += _state_bytes(self._optimizer)
        return sizes

    # -- gradients ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward calls in here keep full-size local gradients; the next one outside reduces them with its own.

        >>> with model.no_sync():
        ...     for x, y in micro_batches[:-1]:
        ...         model(x, y).backward()
        >>> model(*micro_batches[-1]).backward()
        >>> model.optimizer.step()
        """
        engine = self._sharding.engine
        before, engine.gradients.synchronises = engine.gradients.synchronises, False
        try:
            yield
        finally:
            engine.gradients.synchronises = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, those that ``no_sync`` kept included."""
        super().zero_grad(set_to_none)
        for bucket in self._sharding.buckets:
            bucket.release_gradient()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before. Collective."""
        sharding = self._sharding
        refuse_unreduced(sharding.buckets, "clip_grad_norm_()")
        device = sharding.buckets[0].device
        return clip_gradients(sharding.buckets, sharding.channels, device, max_norm, norm_type)

    def _places(self) -> Iterator[tuple[Any, str, nn.Parameter]]:
        for bucket in self._sharding.buckets:
            for name, parameter in zip(bucket.plan.params, bucket.params, strict=True):
                yield bucket, name, parameter

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ShardedModule:
        raise StateError(
            "a sharded model cannot be moved or cast: move or cast the plain model before fxshard.compile, "
            "or choose the compute dtype with precision=fxshard.Precision(...)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "a sharded model cannot be copied or pickled, its parameters are spread over ranks: take "
            "full_state_dict(), or fxshard.save for a checkpoint"
        )

    def _get_name(self) -> str:
        return f"ShardedModule[{type(self._inner).__name__}]"


class _Mirror(nn.Module):
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


class _MirrorList(_Mirror):
    """A mirror of something that is indexed by number."""

    def __getitem__(self, index: int) -> nn.Module:
        return list(self._modules.values())[index]  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]


def _mirror(source: nn.Module, target: nn.Module, sharded: Mapping[int, nn.Parameter]) -> None:
    """Give ``target`` the tree of ``source`` with sharded parameters in it; buffers are shared."""
    mirrors: dict[nn.Module, nn.Module] = {source: target}
    for module in source.modules():
        mirror = mirrors[module]
        mirror.training = module.training
        for name, parameter in module._parameters.items():
            mirror.register_parameter(name, None if parameter is None else sharded[id(parameter)])
        for name, buffer in module._buffers.items():
            mirror.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            if child is not None and child not in mirrors:
                indexed = isinstance(child, (nn.ModuleList, nn.Sequential))
                mirrors[child] = (_MirrorList if indexed else _Mirror)(child)
            mirror._modules[name] = mirrors[child] if child is not None else None


_RETURNS_PARAMETER = (
    "the model returned one of its parameters, or a view of one, but between calls parameters are not in memory; "
    "return a copy that is computed inside forward, for example weight.clone()"
)


def _is_hollow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0 and not value.untyped_storage().nbytes()


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    storages: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                local = value.to_local() if isinstance(value, dist.tensor.DTensor) else value
                storage = local.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
