"""Random training loops (lists of actions), each on a plain model and on a sharded one: the same, refused with an error
of ours, or a finding."""

from __future__ import annotations

import copy
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fxshard._torch.errors import BudgetError, FxshardError
from fxshard.bench.fuzz.models import WIDTH, RandomModel
from fxshard.bench.fuzz.settings import Settings
from fxshard.checkpoint.loading import load
from fxshard.checkpoint.saving import save

Backward = Callable[[str, str, int], float]
"""Forward of the heads in the first string, and backward from those in the second, for the batch of a number."""


class Loop:
    """The actions of a program: made from a seed, the same each time."""

    def __init__(self, seed: int) -> None:
        choice = random.Random(seed + 1)
        self.optimizer = choice.choice(["adamw", "sgd", "own"])
        self.actions = [(choice.choice(list(ACTIONS)), choice.randrange(10**6)) for _ in range(choice.randint(3, 8))]

    def __str__(self) -> str:
        return f"{self.optimizer}: " + ", ".join(name for name, _ in self.actions)

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Backward) -> list[Any]:
        """Everything that can be compared, action by action."""
        found: list[Any] = []
        for name, seed in self.actions:
            found.append((name, *ACTIONS[name](model, optimizer, backward, random.Random(seed))))
        return found


def step(model: nn.Module, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    """A step with one head, with both, or with a loss of one of two results."""
    forward, used = choice.choice([("a", "a"), ("b", "b"), ("ab", "ab"), ("ab", "a"), ("ab", "b")])
    loss = backward(forward, used, choice.randrange(10**6))
    none = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    optimizer.step()
    optimizer.zero_grad(set_to_none=choice.random() < 0.8)
    return loss, none


def accumulated(model: nn.Module, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    """Two micro-batches before a step, which may use different heads."""
    losses = [backward(head, head, choice.randrange(10**6)) for head in choice.choice(["aa", "ab", "ba"])]
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    optimizer.step()
    optimizer.zero_grad()
    return *losses, float(norm)


def evaluate(model: nn.Module, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(choice.randrange(10**6)))
    model.eval()
    with torch.no_grad():
        found = [float(loss) for loss in model(x, "ab")]
    model.train()
    return found


def write_data(model: Any, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    """Attributes of the model and of its parts."""
    model.temperature = choice.uniform(0.5, 2)
    for module in model.modules():
        if hasattr(module, "gain"):
            module.gain = choice.uniform(0.5, 2)
    return ()


def write_buffers(model: Any, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    for module in model.modules():
        if "shift" in module._buffers:
            module.shift = torch.full((WIDTH,), choice.uniform(-1, 1))
    return ()


def write_weights(model: Any, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    factor = choice.uniform(0.5, 1.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return ()


def rate(model: Any, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    factor = choice.uniform(0.1, 5)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return ()


def hook(model: Any, optimizer: Any, backward: Backward, choice: random.Random) -> Sequence[Any]:
    """A forward hook of a part, for one step."""
    factor = choice.uniform(0.5, 2)
    handle = model.heads["a"].register_forward_hook(lambda module, args, out: out * factor)
    found = step(model, optimizer, backward, choice)
    handle.remove()
    return found


ACTIONS = {
    "step": step,
    "another step": step,
    "accumulated": accumulated,
    "evaluate": evaluate,
    "write data": write_data,
    "write buffers": write_buffers,
    "write weights": write_weights,
    "rate": rate,
    "hook": hook,
}


@dataclass(frozen=True)
class Outcome:
    """How a program went: ``kind`` is ``same``, ``refused``, ``different`` or ``crashed``."""

    kind: str
    text: str = ""


def batch(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed + 7919 * rank))


def run_program(seed: int, zero: int) -> Outcome:
    """Run the program of a seed. Collective where there are ranks: each compares for itself.

    Every other program goes on, out of a checkpoint, in a model that is sharded in another way.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loop, plain = Loop(seed), RandomModel(seed)
    settings = Settings(seed, zero, loop.optimizer, ranks)
    # Buffers that forward changes belong to each rank: plain models of the other ranks have their own.
    others = {r: plain if r == rank else copy.deepcopy(plain) for r in range(ranks)}
    model = copy.deepcopy(plain)
    try:
        reference = Run(plain, settings.plain_optimizer(plain), _plain_backward(others, rank, settings.reduction))
        ours = _compiled(settings, model, rank)
        outcome = _compared(loop, settings, ours, reference)
        if seed % 2 and _same_everywhere(outcome):
            loop, moved = Loop(seed + 1), Settings(seed + 1, (zero + 1) % 4, loop.optimizer, ranks)
            moved.own, moved.reduction = settings.own, settings.reduction
            moved.torch, moved.torch_options = settings.torch, settings.torch_options
            for other in others.values():
                _follow(other, plain)
            for buffers in zip(*(other.buffers() for other in others.values()), strict=True):
                for buffer in buffers:
                    buffer.data.copy_(buffers[0])  # a checkpoint has the first rank's
            reference.optimizer.zero_grad()
            outcome = _compared(loop, moved, _moved(moved, ours, plain, rank), reference)
    except FxshardError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome("crashed", f"{settings}: {type(error).__name__}: {error}")
    return outcome


def _same_everywhere(outcome: Outcome) -> bool:
    """Whether no rank has found a difference, which not all of them may see."""
    found = torch.tensor(int(outcome.kind != "same"))
    if dist.is_initialized():
        dist.all_reduce(found)
    return not found


class Run(NamedTuple):
    """A model in training."""

    model: Any
    optimizer: torch.optim.Optimizer
    backward: Backward


def _compiled(settings: Settings, model: RandomModel, rank: int) -> Run:
    budget = None
    if settings.budget is not None:
        tried = settings.compiled(copy.deepcopy(model), model.units, budget=1)
        try:
            _backward(tried, rank)("ab", "ab", 0)
        except BudgetError as error:
            budget = int(error.smallest * settings.budget)
    ours = settings.compiled(model, model.units, budget)
    trained = [parameter for parameter in ours.parameters() if parameter.requires_grad]
    optimizer = ours.optimizer if settings.own is not None else settings.optimizer_of(trained)
    return Run(ours, optimizer, _backward(ours, rank))


def _moved(settings: Settings, ours: Run, plain: RandomModel, rank: int) -> Run:
    """The same model and optimizer, loaded from a checkpoint."""
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for value in (*other.parameters(), *other.buffers()):
            value.zero_()  # all that is known is in the checkpoint
    found = _compiled(settings, other, rank)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        if dist.is_initialized():
            dist.broadcast_object_list(folders)
        path = Path(folders[0], "saved")
        save(ours.model, path, optimizer=ours.optimizer)
        load(found.model, path, optimizer=found.optimizer)
        if dist.is_initialized():
            dist.barrier()  # the first rank's folder goes when it leaves
    return found


def _compared(loop: Loop, settings: Settings, ours: Run, reference: Run) -> Outcome:
    """Both go through a loop."""
    expected, found = loop.run(*reference), loop.run(*ours)
    weights, plain = ours.model.full_state_dict(), reference.model.state_dict()  # ours on all ranks, whatever one finds
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if not _alike(mine, theirs):
            return Outcome(
                "different", f"action {number} of {loop}: {mine} where plain PyTorch has {theirs}; {settings}"
            )
    wrong = [
        name for name, value in plain.items() if not torch.allclose(weights[name], value, 1e-3, 1e-4, equal_nan=True)
    ]
    return Outcome("different", f"{loop}: {wrong} at the end; {settings}") if wrong else Outcome("same")


def _backward(model: nn.Module, rank: int) -> Backward:
    def backward(forward: str, used: str, seed: int) -> float:
        losses = dict(zip(forward, model(batch(seed, rank), forward), strict=True))
        loss = sum(losses[name] for name in used)
        loss.backward()
        return float(loss.detach())

    return backward


def _plain_backward(models: Mapping[int, nn.Module], rank: int, reduction: str) -> Backward:
    """Gradients of all ranks, averaged or added up, in one process; returns the loss of ``rank``."""
    count = len(models) if reduction == "mean" else 1

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
                    share = gradient / count
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
        return math.isclose(mine, theirs, rel_tol=1e-3, abs_tol=1e-5) or (math.isnan(mine) and math.isnan(theirs))
    if isinstance(mine, (tuple, list)) and isinstance(theirs, (tuple, list)):
        return len(mine) == len(theirs) and all(map(_alike, mine, theirs))
    return bool(mine == theirs)
