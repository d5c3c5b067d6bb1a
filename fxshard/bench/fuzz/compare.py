"""One program on a plain model and on a sharded one: the same, refused with an error of ours, or a finding."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxshard._torch.errors import FxshardError
from fxshard.bench.fuzz.loops import Backward, Loop
from fxshard.bench.fuzz.models import WIDTH, RandomModel
from fxshard.frontend.api import compile as sharded
from fxshard.optim.config import AdamW

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


@dataclass(frozen=True)
class Outcome:
    """How a program went: ``kind`` is ``same``, ``refused``, ``different`` or ``crashed``."""

    kind: str
    text: str = ""


def batch(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed + 7919 * rank))


def run_program(seed: int, zero: int) -> Outcome:
    """Run the program of a seed. Collective where there are ranks: each compares for itself."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loop, plain = Loop(seed), RandomModel(seed)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    model = copy.deepcopy(plain)
    # Buffers that forward changes belong to each rank: plain models of the other ranks have their own.
    others = {r: plain if r == rank else copy.deepcopy(plain) for r in range(ranks)}
    expected = loop.run(plain, _optimizer(loop.optimizer, trained), _plain_backward(others, rank))
    try:
        own = AdamW(**SETTINGS) if loop.optimizer == "own" else None
        ours = sharded(model, zero=zero, optimizer=own, units=model.units, lowering="eager")
        parameters = [parameter for parameter in ours.parameters() if parameter.requires_grad]
        optimizer = ours.optimizer if own else _optimizer(loop.optimizer, parameters)
        found = loop.run(ours, optimizer, _backward(ours, rank))
        weights = ours.full_state_dict()
    except FxshardError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__}: {error}")
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if not _alike(mine, theirs):
            return Outcome("different", f"action {number} of {loop}: {mine} where plain PyTorch has {theirs}")
    wrong = [name for name, value in plain.state_dict().items() if not torch.allclose(weights[name], value, 1e-3, 1e-4)]
    return Outcome("different", f"{loop}: {wrong} at the end") if wrong else Outcome("same")


def _optimizer(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, weight_decay=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, **SETTINGS)


def _backward(model: nn.Module, rank: int) -> Backward:
    def backward(forward: str, used: str, seed: int) -> float:
        losses = dict(zip(forward, model(batch(seed, rank), forward), strict=True))
        loss = sum(losses[name] for name in used)
        loss.backward()
        return float(loss.detach())

    return backward


def _plain_backward(models: Mapping[int, nn.Module], rank: int) -> Backward:
    """Gradients of the mean over ranks, in one process; returns the loss of ``rank``."""

    def backward(forward: str, used: str, seed: int) -> float:
        own = 0.0
        source = models[rank]
        for other, model in models.items():
            if model is not source:
                _follow(model, source)
            losses = dict(zip(forward, model(batch(seed, other), forward), strict=True))
            loss = sum(losses[name] for name in used)
            gradients = torch.autograd.grad(loss, _trained(model), allow_unused=True)
            for parameter, gradient in zip(_trained(source), gradients, strict=True):
                if gradient is not None:
                    share = gradient / len(models)
                    parameter.grad = share if parameter.grad is None else parameter.grad + share
            own = float(loss.detach()) if other == rank else own
        return own

    return backward


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _follow(model: nn.Module, source: nn.Module) -> None:
    """Another rank's model has the weights and the settings of this one's, and buffers of its own."""
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)
    for mine_module, theirs_module in zip(model.modules(), source.modules(), strict=True):
        mine_module.training = theirs_module.training
        for name in ("gain", "temperature", "shift", "_forward_hooks"):
            if hasattr(theirs_module, name):
                setattr(mine_module, name, getattr(theirs_module, name))


def _alike(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=1e-3, abs_tol=1e-5)
    if isinstance(mine, (tuple, list)) and isinstance(theirs, (tuple, list)):
        return len(mine) == len(theirs) and all(map(_alike, mine, theirs))
    return bool(mine == theirs)
