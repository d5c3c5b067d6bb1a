"""Muon and AdamW over plain tensors in one process, as one ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.optim import muon_rule as rule
from fxshard.optim.config import Muon
from fxshard.optim.directions import moved_directions
from fxshard.optim.verdict import Verdicts


class PlainMuon(torch.optim.Optimizer):
    """What ``fxshard.Muon(...).build(model)`` makes: Muon's groups first, then AdamW's; see ``group["kind"]``.

    LR schedulers, ``param_groups`` and ``state_dict`` work as usual. The name of the coefficients and the number of
    steps are part of the state and must be the same where it is loaded. On a GPU, a step whose gradients are not finite
    changes nothing, and is reported when the next begins or the state is read.
    """

    def __init__(self, model: nn.Module | Iterable[tuple[str, torch.Tensor]], choice: Muon) -> None:
        named = list(model.named_parameters() if isinstance(model, nn.Module) else model)
        self._choice = choice
        self._splits = rule.matrices(choice, model if isinstance(model, nn.Module) else named)
        self._verdicts = Verdicts(choice.nan, "Muon")
        super().__init__(groups(choice, named, self._splits), {"lr": choice.lr})

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
        if not self._gradients_are_fine():
            return loss
        for group in self.param_groups:
            with_grad = [
                (name, p) for name, p in zip(group["param_names"], group["params"], strict=True) if p.grad is not None
            ]
            if with_grad:
                (self._muon if group["kind"] == "muon" else self._adamw)(group, with_grad)
        return loss

    def state_dict(self) -> dict[str, Any]:
        self._verdicts.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_loaded(self.param_groups, state_dict["param_groups"])
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

    def _muon(self, group: dict[str, Any], named: Sequence[tuple[str, torch.Tensor]]) -> None:
        params = [parameter for _, parameter in named]
        splits = [self._splits[name] for name, _ in named]
        momenta = [self._momentum(parameter) for parameter in params]
        refused = self._verdicts.refused
        directions, factors = moved_directions(_grads(params), momenta, splits, group, self._choice.form, refused)
        rule.apply_(params, directions, group["lr"], group["weight_decay"], factors, refused)

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]

    def _adamw(self, group: dict[str, Any], named: Sequence[tuple[str, torch.Tensor]]) -> None:
        params = [parameter for _, parameter in named]
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
        private.fused_adamw(
            params,
            _grads(params),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            lr=group["lr"],
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            refused=self._verdicts.refused,
        )


def _grads(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in params if parameter.grad is not None]


def groups(choice: Muon, named: Iterable[tuple[str, torch.Tensor]], muon: Container[str]) -> list[dict[str, Any]]:
    """Param groups of (name, parameter) pairs: Muon's, then AdamW's with and without decay, where there are any."""
    members: dict[str, list[tuple[str, torch.Tensor]]] = {"muon": [], "adamw": [], "adamw, no decay": []}
    decays = choice.adamw.decay
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        kind = "muon" if name in muon else "adamw"
        if kind == "adamw" and decays is not None and not decays(name, tuple(parameter.shape)):
            kind = "adamw, no decay"
        members[kind].append((name, parameter))
    adamw = {"kind": "adamw", "lr": choice.adamw.lr, "betas": choice.adamw.betas, "eps": choice.adamw.eps}
    options: dict[str, dict[str, Any]] = {
        "muon": {
            "kind": "muon",
            "lr": choice.lr,
            "momentum": choice.momentum,
            "nesterov": choice.nesterov,
            "weight_decay": choice.weight_decay,
            "scale": choice.scale,
            "coefficients": choice.coefficients,
            "steps": choice.steps,
        },
        "adamw": {**adamw, "weight_decay": choice.adamw.weight_decay},
        "adamw, no decay": {**adamw, "weight_decay": 0.0},
    }
    return [{"params": pairs, **options[kind]} for kind, pairs in members.items() if pairs]


def check_loaded(ours: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``StateError`` if the groups of a state dict were made by another iteration or for other parameters."""
    if [group.get("kind") for group in loaded] != [group["kind"] for group in ours]:
        raise StateError(
            f"the optimizer state has groups {[group.get('kind') for group in loaded]}, this optimizer has "
            f"{[group['kind'] for group in ours]}: it was saved by another optimizer, or with another use= or decay="
        )
    for theirs, group in zip(loaded, ours, strict=True):
        for field in ("coefficients", "steps"):
            if group["kind"] == "muon" and theirs.get(field) != group[field]:
                raise StateError(
                    f"the optimizer state was made with {field}={theirs.get(field)!r}, this optimizer has "
                    f"{field}={group[field]!r}; the two do not train alike: pass fxshard.Muon({field}="
                    f"{theirs.get(field)!r}), or start from a fresh optimizer state"
                )
