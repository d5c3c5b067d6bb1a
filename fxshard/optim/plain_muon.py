"""Muon and AdamW over plain tensors in one process, as one ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fxshard.optim import muon_rule as rule
from fxshard.optim.adamw_step import fused_
from fxshard.optim.config import Muon
from fxshard.optim.directions import in_turns, update_
from fxshard.optim.groups import check_group, check_patterns, check_states, in_our_order, param_groups, saved
from fxshard.optim.verdict import Verdicts
from fxshard.planner.state import ROW_MOMENTS

MUON_STATE, ADAMW_STATE = ("momentum_buffer",), ("step", "exp_avg", "exp_avg_sq")


class PlainMuon(torch.optim.Optimizer):
    """The optimizer of ``fxshard.Muon(...).build(model)``: Muon's groups first, then AdamW's; see ``group["kind"]``.

    LR schedulers, ``param_groups`` and ``state_dict`` work as usual. The name of the coefficients and the number of
    steps are part of the state and must be the same where it is loaded. On a GPU, a step whose gradients are not finite
    changes nothing, and is reported when the next begins or the state is read.
    """

    def __init__(self, model: nn.Module | Iterable[tuple[str, torch.Tensor]], choice: Muon) -> None:
        named = list(model.named_parameters() if isinstance(model, nn.Module) else model)
        self._choice = choice
        given = model if isinstance(model, nn.Module) else named
        self._splits = rule.matrices(choice, given)
        fused = rule.found_fused(choice, given)
        self.splits = {name: found for name, found in fused.items() if name in self._splits}
        """Weights that look fused, and how they are cut, or why they are not."""
        self._verdicts = Verdicts(choice.nan, "Muon")
        check_patterns(choice, [name for name, p in named if p.requires_grad], self._splits)
        super().__init__(param_groups(choice, named, self._splits), {"lr": choice.lr})

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out because gradients were not finite. Waits for the last one."""
        self._verdicts.settle()
        return self._verdicts.left_out

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_group(group)
        if not self._gradients_are_fine():
            return loss
        self._muon([group for group in self.param_groups if group["kind"] == "muon"])
        for group in self.param_groups:
            if group["kind"] == "adamw":
                self._adamw(group, [parameter for parameter in group["params"] if parameter.grad is not None])
        return loss

    def state_dict(self) -> dict[str, Any]:
        self._verdicts.settle()
        return saved(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = in_our_order(self.param_groups, state_dict)
        muon = {id(p) for group in self.param_groups if group["kind"] == "muon" for p in group["params"]}
        of_muon = MUON_STATE if self._choice.beta2 is None else (*MUON_STATE, ROW_MOMENTS)
        check_states(self.param_groups, state_dict, lambda p: of_muon if id(p) in muon else ADAMW_STATE)
        self._verdicts.settle(may_raise=False)  # what the step would have spoilt is about to be replaced
        super().load_state_dict(state_dict)

    def _gradients_are_fine(self) -> bool:
        self._verdicts.settle()
        named = [
            (name, p.grad)
            for group in self.param_groups
            for name, p in zip(group["param_names"], group["params"], strict=True)
            if p.grad is not None
        ]
        finite = rule.finite([grad for _, grad in named])
        return self._verdicts.may_step([name for name, _ in named], finite, finite.all())

    def _muon(self, groups: Sequence[dict[str, Any]]) -> None:
        with_grad = [
            (name, p, group)
            for group in groups
            for name, p in zip(group["param_names"], group["params"], strict=True)
            if p.grad is not None
        ]
        for members in in_turns([group for _, _, group in with_grad], [p for _, p, _ in with_grad]):
            params = [with_grad[i][1] for i in members]
            splits = [self._splits[with_grad[i][0]] for i in members]
            own = [with_grad[i][2] for i in members]
            momenta = [self._momentum(parameter) for parameter in params]
            seconds, refused = self._row_moments(params), self._verdicts.refused
            update_(params, _grads(params), momenta, splits, own, self._choice.form, refused, seconds)

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]

    def _row_moments(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        if self._choice.beta2 is None:
            return None
        for parameter in params:
            if ROW_MOMENTS not in self.state[parameter]:
                self.state[parameter][ROW_MOMENTS] = parameter.new_zeros((*parameter.shape[:-1], 1))
        return [self.state[parameter][ROW_MOMENTS] for parameter in params]

    def _adamw(self, group: dict[str, Any], params: Sequence[torch.Tensor]) -> None:
        if not params:
            return
        for parameter in params:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in params]
        for state in states:
            state["step"].add_(1 if self._verdicts.allowed is None else self._verdicts.allowed)
        kept = [(state["exp_avg"], state["exp_avg_sq"], state["step"]) for state in states]
        pieces = [(p, grad, *of_p) for p, grad, of_p in zip(params, _grads(params), kept, strict=True)]
        fused_(group, pieces, self._verdicts.refused)


def _grads(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in params if parameter.grad is not None]
