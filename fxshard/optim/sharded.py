"""What the optimizers over buckets have in common: they run the program of a step and keep state in flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxshard._torch import private
from fxshard._torch.errors import ConfigError
from fxshard.optim.moments import Moments
from fxshard.optim.muon_rule import finite
from fxshard.optim.verdict import Verdicts
from fxshard.plan.step import Done, Instruction, Local, plan_step
from fxshard.runtime.engine import Engine


class ShardedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` over the sharded parameters: LR schedulers, groups and ``state_dict`` work as usual.

    State lives in flat tensors, ``state[p]`` holds views of them. Parameters of a bucket that share a group and lie
    side by side are updated by AdamW as one tensor, which for most models is the whole shard.
    """

    gathers_ahead = True
    """Buckets that the next forward starts with are gathered here, each as soon as it is updated."""

    def __init__(
        self, engine: Engine, groups: list[dict[str, Any]], defaults: dict[str, Any], verdicts: Verdicts | None
    ) -> None:
        super().__init__(groups, defaults)
        self._engine = engine
        self._verdicts = verdicts
        self._moments = {b.plan.index: Moments(b) for b in engine.buckets if b.plan.trainable}
        self._program = plan_step([bucket.plan for bucket in engine.buckets])
        self._bind_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for moments in self._moments.values():
            moments.bucket.adopt_gradients()
        if self._may_step():
            for instruction in self._program:
                self._run(instruction)
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
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.settle(may_raise=False)  # what the last step would have spoilt is about to be replaced
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for moments in self._moments.values():
                for i, parameter in enumerate(moments.bucket.params):
                    if self.state.get(parameter):
                        moments.load(i, self.state[parameter])
                    else:
                        moments.clear(i)
        self._bind_state()

    def settle(self, *, may_raise: bool = True) -> None:
        """Say what is still to be said about the last step, before its state is read. An optimizer that looks at no
        gradients has nothing to say.
        """
        if self._verdicts is not None:
            self._verdicts.settle(self._take_back, may_raise=may_raise)

    def _take_back(self) -> None:
        for moments in self._moments.values():
            moments.take_back()

    def state_was_written(self) -> None:
        """The state tensors were written in place, as loading a checkpoint does."""
        self.settle(may_raise=False)
        for moments in self._moments.values():
            moments.recount()

    def _may_step(self) -> bool:
        """Whether the gradients are such that a step may be made; asked on every rank, before anything is changed."""
        self.settle()
        if self._verdicts is None:
            return True
        grads = {
            name: moments.bucket.as_rows(moments.bucket.grad, name)
            for moments in self._moments.values()
            if moments.bucket.grad is not None
            for name, parameter in zip(moments.bucket.plan.params, moments.bucket.params, strict=True)
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

    def _run(self, instruction: Instruction) -> None:
        match instruction:
            case Local(buckets):
                self._adamw([self._moments[index] for index in buckets])
            case Done(buckets):
                for index in buckets:
                    self._engine.carry(index)

    def _adamw(self, chosen: Sequence[Moments]) -> None:
        group_of = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        pieces: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in self.param_groups]
        allowed = self._verdicts.allowed if self._verdicts is not None else None
        for moments in chosen:
            moments.count_step(allowed)
            for number, positions in moments.stretches(group_of):
                pieces[number].append(moments.tensors(positions))
        for group, of_group in zip(self.param_groups, pieces, strict=True):
            if of_group:
                masters, grads, firsts, seconds, steps = (list(column) for column in zip(*of_group, strict=True))
                private.fused_adamw(
                    masters,
                    grads,
                    firsts,
                    seconds,
                    steps,
                    lr=group["lr"],
                    betas=group["betas"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    refused=self._refused,
                )

    def _bind_state(self) -> None:
        for moments in self._moments.values():
            for i, parameter in enumerate(moments.bucket.params):
                self.state[parameter] = moments.state_of(i)
