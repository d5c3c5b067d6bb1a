"""The base of the optimizers over buckets: it runs the program of a step and keeps the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxshard._torch.errors import ConfigError, StateError
from fxshard.optim.adamw_step import adamw_step
from fxshard.optim.groups import check_group, check_states, in_our_order, saved
from fxshard.optim.host import Transfers
from fxshard.optim.moments import Moments
from fxshard.optim.muon_rule import finite
from fxshard.optim.qk_clip import QKClip
from fxshard.optim.verdict import Verdicts
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.optimizer_step import Done, Local, Share, StepInstruction, plan_step
from fxshard.runtime.engine import Engine


class ShardedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` over the sharded parameters: LR schedulers, groups and ``state_dict`` work as usual.

    ``state[p]`` holds views of a bucket's state. AdamW updates all parameters of a group in one call of torch's kernel;
    state in fewer bits, or on the host, one parameter after another, and ``state[p]`` makes fp32 copies of it when
    asked.
    """

    gathers_ahead = True
    """Buckets that the next forward starts with are gathered here, each as soon as it is updated."""

    def __init__(
        self,
        engine: Engine,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        verdicts: Verdicts | None,
        qk_clip: float | None,
        decided: bool,
    ) -> None:
        """``decided``: whether buckets know how state is kept; else it waits on the host, in fp32, for ``keep``."""
        super().__init__(groups, defaults)
        self._engine = engine
        self._name_of = {id(parameter): name for bucket in engine.buckets for name, parameter in bucket.named()}
        self._group_of: dict[str, dict[str, Any]] = {}
        """By name of the parameter, as ``param_groups`` were when the step began."""
        self._verdicts = verdicts
        self._qk_clip = QKClip(engine, qk_clip) if qk_clip is not None else None
        self._transfers: Transfers | None = None
        self._moments: dict[int, Moments] = {}
        self._waiting = not decided
        """Whether it is not decided yet how state is kept."""
        self._written = False
        """Whether state was ever stepped or loaded; until then it is zero everywhere."""
        self._program = plan_step([bucket.plan for bucket in engine.buckets])
        self._make_moments([bucket.plan for bucket in engine.buckets if bucket.plan.trainable])

    def keep(self, buckets: Sequence[BucketPlan]) -> None:
        """Keep state in the formats and places of these plans from now on; what is there is converted."""
        kept = {index: (moments.format, moments.place) for index, moments in self._moments.items()}
        others = [plan for plan in buckets if plan.trainable and kept[plan.index] != (plan.state, plan.offload)]
        if self._waiting or others:
            self.settle()
            if self._waiting:  # in memory that is not pinned, and with places for larger pieces
                self._waiting, self._transfers = False, None
                others = [plan for plan in buckets if plan.trainable]
            self._make_moments(others)

    @torch.inference_mode(False)  # where an evaluation is what moves them
    @torch.no_grad()
    def _make_moments(self, plans: Sequence[BucketPlan]) -> None:
        """One bucket after another, so that little memory is taken twice."""
        if self._transfers is None and (self._waiting or any(plan.offload == "host" for plan in plans)):
            self._transfers = Transfers(self._engine.device)
        for plan in plans:
            bucket, before = self._engine.buckets[plan.index], self._moments.pop(plan.index, None)
            if self._waiting:
                made = Moments(bucket, plan.state, self._transfers, pinned=False)
            else:
                made = Moments(bucket, plan.state, self._transfers if plan.offload == "host" else None)
            if before is not None and self._written:
                made.take_over(before)
            self._moments[plan.index] = made
        self._moments = dict(sorted(self._moments.items()))
        self._bind_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._group_of = self._checked_groups()
        for moments in self._moments.values():
            moments.bucket.adopt_gradients()
        if self._may_step():
            self._written = True
            if self._qk_clip is not None:
                self._qk_clip.begin(self._refused)
            for instruction in self._program:
                self._run(instruction)
            if self._transfers is not None:
                self._transfers.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for moments in self._moments.values():
            moments.bucket.release_gradient()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are those of the sharded model: what else is to be trained needs an optimizer of its own."""
        if hasattr(self, "_moments"):
            raise ConfigError(
                "add_param_group: this optimizer updates the parameters of the sharded model and no others; make a "
                "torch.optim optimizer for the rest, or pass decay= and use= to fxshard.AdamW and fxshard.Muon"
            )
        super().add_param_group(param_group)

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out because gradients were not finite. Waits for the last one."""
        self.settle()
        return self._verdicts.left_out if self._verdicts is not None else 0

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        self._name_groups()
        found = saved(super().state_dict())
        return {**found, "state": {key: dict(state) for key, state in found["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a plain optimizer's state or a sharded one, by name where it has names, else in the order of the
        model's ``parameters()``. Everything is checked before anything is changed.
        """
        self._name_groups()
        state_dict = in_our_order(self.param_groups, state_dict)
        check_states(self.param_groups, state_dict, lambda parameter: self.state[parameter])
        self.settle(may_raise=False)  # what the last step would have spoilt is about to be replaced
        self._written = True
        loaded = self._states_of(state_dict)
        # torch would bring all state to the device at once, where there may be no room for it.
        super().load_state_dict({**state_dict, "state": {}})
        with torch.no_grad():
            for moments in self._moments.values():
                for i, parameter in enumerate(moments.bucket.params):
                    if loaded.get(parameter):
                        moments.load(i, loaded[parameter])
                    else:
                        moments.clear(i)
        self._bind_state()

    def _states_of(self, given: dict[str, Any]) -> Mapping[torch.Tensor, Any]:
        """The states of a state dict by our parameters, which its groups list in our order."""
        pairs = zip(self.param_groups, given["param_groups"], strict=True)
        keys = ((own, key) for ours, theirs in pairs for own, key in zip(ours["params"], theirs["params"], strict=True))
        return {own: given["state"].get(key) for own, key in keys}

    def settle(self, *, may_raise: bool = True) -> None:
        """Say what is still to be said about the last step, before its state is read. An optimizer that looks at no
        gradients has nothing to say.
        """
        if self._transfers is not None:
            self._transfers.finish()
        self._judge(may_raise=may_raise)

    def _judge(self, *, may_raise: bool = True) -> None:
        if self._verdicts is not None:
            self._verdicts.settle(self._take_back, may_raise=may_raise)

    def _take_back(self) -> None:
        for moments in self._moments.values():
            moments.take_back()

    def state_was_written(self) -> None:
        """The state tensors were written in place, as loading a checkpoint does."""
        self.settle(may_raise=False)
        self._written = True
        for moments in self._moments.values():
            moments.recount()

    def _name_groups(self) -> None:
        """Names follow parameters that were moved between groups."""
        for group in self.param_groups:
            group["param_names"] = [self._name_of[id(parameter)] for parameter in group["params"]]

    def _checked_groups(self) -> dict[str, dict[str, Any]]:
        """The group of every parameter; raises if a group says what cannot be done."""
        found = {}
        for group in self.param_groups:
            check_group(group)
            found.update({self._name_of.get(id(parameter), ""): group for parameter in group["params"]})
        for moments in self._moments.values():
            for name in moments.bucket.plan.params:
                if name not in found:
                    raise StateError(
                        f"{name} is in none of param_groups: leave it there with lr=0, or freeze it before compile"
                    )
                if (found[name].get("kind") == "muon") != (name in moments.muon):
                    raise StateError(
                        f"{name} was moved to a group of kind {found[name].get('kind')!r}: choose with "
                        "fxshard.Muon(use=...) which parameters are Muon's"
                    )
        return found

    def _may_step(self) -> bool:
        """Whether the gradients are such that a step may be made; asked on every rank, before anything is changed."""
        self._judge()
        if self._qk_clip is not None:
            self._qk_clip.take()
        if self._verdicts is None:
            return True
        grads = {
            name: moments.bucket.as_rows(moments.bucket.grad, name)
            for moments in self._moments.values()
            if moments.bucket.grad is not None
            for name, parameter in moments.bucket.named()
            if parameter.grad is not None
        }
        filled = {name: grad for name, grad in grads.items() if grad.numel()}
        here = finite(list(filled.values()), self._engine.device)
        everywhere = self._engine.on_all_ranks(here.all(), "whether gradients are finite")
        return self._verdicts.may_step(list(filled), here, everywhere)

    @property
    def _refused(self) -> torch.Tensor | None:
        """A number on the device by which kernels make the step (0.0) or not (1.0); None: they make it."""
        return self._verdicts.refused if self._verdicts is not None else None

    def _run(self, instruction: StepInstruction) -> None:
        match instruction:
            case Local(buckets):
                self._adamw([self._moments[index] for index in buckets])
            case Share(buckets):
                for index in buckets:
                    self._engine.share(index, self._moments[index].shares)
            case Done(buckets):
                for index in buckets:
                    if self._qk_clip is not None:
                        self._qk_clip.apply(self._moments[index].bucket)
                    self._engine.carry(index)

    def _adamw(self, given: Sequence[Moments]) -> None:
        allowed = self._verdicts.allowed if self._verdicts is not None else None
        for moments in given:
            moments.count_step(allowed)
        adamw_step(given, self._group_of, self._refused)

    def _bind_state(self) -> None:
        for moments in self._moments.values():
            for i, parameter in enumerate(moments.bucket.params):
                self.state[parameter] = moments.state_of(i)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's moments: on the device, and on the host."""
        sizes = {"device": 0, "host": 0}
        for moments in self._moments.values():
            sizes["device" if moments.place == "none" else "host"] += moments.memory.nbytes
        return sizes


def in_order(engine: Engine, order: Sequence[str]) -> list[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of what is trained, in the order of the model's ``parameters()``; buckets have another one."""
    trained = [bucket for bucket in engine.buckets if bucket.plan.trainable]
    found = {name: p for bucket in trained for name, p in bucket.named()}
    return [(name, found[name]) for name in order if name in found]
