"""``ShardedModule``: what ``fxshard.compile`` returns, a module with the names of the one it was made from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fxshard._torch import private
from fxshard._torch.errors import AbsentError, ConfigError, FxshardError, PeerError, RankDivergenceError, StateError
from fxshard.frontend import likeness, state, state_dicts
from fxshard.frontend.attributes import LikePlain
from fxshard.frontend.backend import Backend
from fxshard.frontend.capture import FAILURES, cast_floats, explained
from fxshard.frontend.emptied import refuse_uses
from fxshard.frontend.mirror import follow_training, mirror
from fxshard.frontend.profiling import profiled
from fxshard.frontend.report import Report, report_of
from fxshard.frontend.sharding import Sharding
from fxshard.frontend.state import ParameterIdentity
from fxshard.frontend.transformers_calls import Calls
from fxshard.frontend.unsharded import Unsharded
from fxshard.runtime.agreement import COMMUNICATION
from fxshard.runtime.eager_reads import EagerReads, unseen_read
from fxshard.runtime.hollow import hooks_for_activations, is_hollow
from fxshard.runtime.norms import all_norms, clip_gradients
from fxshard.runtime.optimizer_steps import refuse_unreduced
from fxshard.schedule.profile import Profile
from fxshard.schedule.schedule import Schedule


class ShardedModule(LikePlain):
    """A module whose parameters are sharded: same names, same forward, this rank's part of the memory.

    ``parameters()`` gives sharded tensors (``DTensor`` where there is a process group) that ``clip_grad_norm_`` and the
    elementwise classes of ``torch.optim`` take; others are refused. ``model.layers[0].weight`` works as before.
    """

    _compiled: Callable[..., Any] | None
    _compile: Callable[[], Callable[..., Any]]

    def __init__(self, inner: nn.Module, sharding: Sharding, backend: Backend) -> None:
        super().__init__()
        object.__setattr__(self, "_compiled", None)
        self._sharding = sharding
        self._backend = backend
        backend.compiled.live_as_long_as(self)
        self._optimizer: torch.optim.Optimizer | None = None
        self._reads: EagerReads | None = None
        self._unsharded: Unsharded | None = None
        self._identity = ParameterIdentity(sharding.buckets)
        self._calls = Calls(inner)
        by_name = {name: parameter for _, name, parameter in state.places(sharding.buckets)}
        by_identity = {id(hollow): by_name[name] for name, hollow in sharding.hollow.items()}
        mirror(inner, self, by_identity)
        # Not registered as a submodule: its parameters are hollow and have no place in parameters() or state_dict().
        object.__setattr__(self, "_inner", inner)
        refuse_uses(inner)
        self.__class__ = likeness.class_for(ShardedModule, type(inner))

    def bind(self, compile: Callable[[], Callable[..., Any]], *, fullgraph: bool = True) -> None:
        """Run what ``compile`` gives from now on, and ask it again to reschedule; ``fxshard.compile`` calls this."""
        self._backend.one_graph, self._backend.allows_breaks = fullgraph, not fullgraph
        if not fullgraph:
            self._reads = EagerReads(self._sharding.engine, self._sharding.hollow_places(), self._inner)
        object.__setattr__(self, "_compile", compile)
        object.__setattr__(self, "_compiled", compile())  # an nn.Module too, and no submodule of ours

    # -- running -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._sharding.precision
        if precision is not None and precision.param is not None and precision.cast_inputs:
            args, kwargs = cast_floats((args, kwargs), precision.param)
        if not torch.compiler.is_compiling():
            return self._run(*args, **kwargs)
        if self._compiled is not None:  # torch.compile around the model, or around a step that calls it
            return self._run_as_compiled(*args, **kwargs)
        # torch.compile(model, backend="fxshard") traces through here. Code between graphs, or ahead of the first one,
        # would find parameters without memory.
        return private.call_unbroken(self._inner, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._identity.check()
        if self._unsharded is not None:
            self._unsharded.refuse("the model was called")
        if self._compiled is None:
            raise StateError(
                "this model is sharded but not compiled, and its parameters are not in memory: "
                'call torch.compile(model, backend="fxshard") and use the result, or make it with fxshard.compile'
            )
        kwargs = self._calls.keywords(args, kwargs)
        try:
            with self._reads or contextlib.nullcontext(), hooks_for_activations():
                result = self._compiled(*args, **kwargs)
        except FAILURES as error:
            raise self._failed(explained(error, self._inner, self._backend.captured)) from error
        except FxshardError as error:
            raise self._failed(error) from None
        except RuntimeError as error:
            if "storage of size 0" in str(error):
                raise StateError(_RETURNS_PARAMETER) from error
            unseen = unseen_read(error, self._inner)
            if unseen is not None:
                raise self._failed(unseen) from error
            raise
        if any(is_hollow(leaf) for leaf in tree_leaves(result)):
            raise StateError(_RETURNS_PARAMETER)
        return result

    _run_as_compiled = torch.compiler.disable(_run, reason="fxshard.compile has compiled the model: no fullgraph=True")
    """For another ``torch.compile``: it captures what is around the call, and the model's own programs run."""

    def _failed(self, error: FxshardError) -> FxshardError:
        """Until the ranks have agreed on a schedule, each waits for the others there: tell them not to."""
        told_already = isinstance(error, (PeerError, RankDivergenceError))
        if not told_already and not self._sharding.agreement.settled(COMMUNICATION):
            self._sharding.agreement.fail(error)
        return error

    def train(self, mode: bool = True) -> ShardedModule:
        self._inner.train(mode)
        self.__dict__["training"] = self._inner.training
        follow_training(self)
        return self

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer given to ``fxshard.compile``."""
        if self._optimizer is None:
            raise AbsentError(
                "no optimizer was given: pass optimizer=fxshard.AdamW(...), or use torch.optim with model.parameters()"
            )
        return self._optimizer

    @contextlib.contextmanager
    def profile(self, steps: int = 3) -> Iterator[Profile]:
        """Record how long compute and collectives of the first ``steps`` steps inside the block take. Collective.

        The steps are real ones with the same results; they are slower, because nothing overlaps while it is timed. The
        profile is filled when the block ends, with the same figures on every rank.

        >>> with model.profile(steps=3) as profile:
        ...     for x, y in batches:
        ...         train(model, x, y)
        >>> model.reschedule(profile)
        """
        with profiled(self, steps) as profile:
            yield profile

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
        self.capture_again()

    def capture_again(self) -> None:
        """Forget the captured graphs: the next call captures the model as it is then. What was compiled is used again.

        Needed after changes that ``torch.compile`` does not notice. Attributes, buffers and hooks of the model are
        noticed; hooks of the plain module, and functions that forward calls and that were replaced, are not.
        """
        if self._compiled is None:
            raise StateError(
                "only a model from fxshard.compile can be captured again: this one is sharded, not compiled; change "
                "the plain module before fxshard.shard"
            )
        self._backend.compiled.empty()
        object.__setattr__(self, "_compiled", self._compile())

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """The emitted communication schedule; it exists once the model has been called."""
        schedules = self._backend.schedules
        if not schedules:
            raise AbsentError("there is no schedule yet: it is made when the model is called for the first time")
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
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The rewritten graphs by phase: ``print(model.graphs["forward"].graph)``, likewise backward and eval."""
        return self._backend.graphs

    @property
    def report(self) -> Report:
        """What was captured, compiled and read so far; ``print(model.report)``."""
        reads = dict(self._reads.places) if self._reads is not None else {}
        return report_of(self._sharding, self._backend, reads, getattr(self._optimizer, "splits", {}))

    @property
    def zero(self) -> int:
        return self._sharding.zero

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Sharded parameters and buffers under the plain model's keys; ``torch.save`` takes them."""
        place = state.place_of(self._sharding.buckets)

        def give(value: torch.Tensor) -> torch.Tensor:
            bucket, name = place.get(id(value), (None, ""))
            return value.detach() if bucket is None else bucket.hand_out(name)

        with state_dicts.giving(self, give):
            return self._give_state_dict(*args, **kwargs)

    def full_state_dict(self) -> dict[str, Any]:
        """The unsharded model on every rank, on the CPU, with the plain model's keys. A collective call."""
        self._sharding.agreement.meet("full_state_dict()")
        own = self._tensors()
        whole = state.whole(own, self._sharding.buckets)
        by_identity = {id(value): whole[name] for name, value in own.items()}
        with state_dicts.giving(self, lambda value: by_identity[id(value)]):
            return self._give_state_dict()  # type: ignore[no-any-return]

    _give_state_dict = nn.Module.state_dict

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        state_dicts.save_own(self, self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:  # type: ignore[override]
        state_dicts.find_own(self, self, state_dict, prefix, *rest)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by the plain model's keys."""
        return state_dicts.tensors(self)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a plain (full) or a sharded state dict. Everything is checked before anything is changed; hooks of
        modules run as ``nn.Module`` runs them."""
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True): a sharded parameter is a view of its bucket; load without assign"
            )
        return self._take_state_dict(state_dict, strict)

    def _take_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        return state_dicts.load(self, self._inner, state_dict, self._sharding.buckets, strict=strict)

    def delete_cuda_graphs(self) -> None:
        """Let go of what ``cuda_graphs=True`` captured; the model runs without from then on.

        NCCL ends no process group while graphs have its collectives: ``destroy_process_group`` would wait for ever.

        >>> model.delete_cuda_graphs()
        >>> torch.distributed.destroy_process_group()
        """
        if self._sharding.engine.replays is not None:
            self._sharding.engine.replays.delete()

    def parameters_changed(self) -> None:
        """Say that parameters were written in a way that torch does not count. To be called on every rank.

        What is kept unsharded, or was gathered ahead of the next forward, is then gathered again. Operations on the
        parameters themselves, ``load_state_dict``, ``fxshard.load`` and optimizers are seen without it; writes through
        ``parameter.data``, by ``torch._foreach`` functions, or by a kernel of your own are not.

        >>> with torch.no_grad():
        ...     torch._foreach_clamp_max_(list(model.parameters()), 1.0)
        >>> model.parameters_changed()
        """
        for bucket in self._sharding.buckets:
            bucket.changed()

    def bytes_at_rest(self) -> dict[str, int]:
        """Bytes this rank holds between steps, counted from the storages that exist: param, grad, state."""
        return state.bytes_at_rest(self._sharding.buckets, self._optimizer)

    def unshard(self, *parts: nn.Module | str, writeback: bool = True) -> Unsharded:
        """Whole parameters in place of the sharded ones, on every rank, of the model or of ``parts`` of it. Collective.

        A context, or until ``reshard()``. Parameters are in the dtype that is kept; ``model.layers[0].weight``,
        ``state_dict()`` and calls of parts see them. What is written goes back to the shards at the end: each rank
        keeps its own rows, so all ranks must write the same. With ``writeback=False`` having written is an error; so
        is calling the model inside, or a gradient. If the block raises, shards are as they were.

        >>> with model.unshard("layers.0") as whole:
        ...     model.layers[0].norm.weight.data.fill_(1.0)
        """
        if self._unsharded is not None:
            raise StateError("this model is unsharded already: leave that block, or call model.reshard(), first")
        self._unsharded = Unsharded(self, parts, writeback=writeback)
        return self._unsharded

    def reshard(self) -> None:
        """End what ``unshard()`` began, where it is not used as a context. To be called on every rank."""
        if self._unsharded is None:
            raise StateError("this model is not unsharded: model.unshard() comes first")
        self._unsharded.close()

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
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before. Collective.

        ``max_norm=math.inf`` measures it alone. Numbers that are not above 0 are refused: they are often another
        library's word for no clipping, and gradients would be zero, or turned around.
        """
        sharding = self._sharding
        refuse_unreduced(sharding.buckets, "clip_grad_norm_()")
        device = sharding.buckets[0].device
        return clip_gradients(sharding.buckets, sharding.channels, device, max_norm, norm_type)

    def norms(self, of: str = "grad") -> dict[str, torch.Tensor]:
        """The norm of every gradient, or with ``of="param"`` of every parameter, by name; ``""`` is that of all.

        For logging: numbers in fp32 on the device, equal on all ranks, which the host does not wait for. Collective.

        >>> for name, norm in model.norms().items():
        ...     log(name or "all", norm)
        """
        if of not in ("grad", "param"):
            raise ConfigError(f"norms(of={of!r}): expected 'grad' or 'param'")
        sharding = self._sharding
        if of == "grad":
            refuse_unreduced(sharding.buckets, "norms()")
        order = [name for name, _ in self.named_parameters()]
        return all_norms(sharding.buckets, sharding.channels, order, of_gradients=of == "grad")


_RETURNS_PARAMETER = (
    "the model returned one of its parameters, or a view of one, but between calls parameters are not in memory; "
    "return a copy that is computed inside forward, for example weight.clone()"
)
